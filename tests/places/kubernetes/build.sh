#!/usr/bin/env bash
# Build kube-apiserver and kube-controller-manager from Debian's source package, with etcd from its binary package.
#
# Prints the folder of the three programs. They are kept in ${STOKER_TEST_CACHE:-~/.cache/stoker-tests}, under the
# version of the source package; nothing is installed, and no root is needed. The first time takes eight minutes of CPU.
set -euo pipefail

cache=${STOKER_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker-tests}
for program in apt-get dpkg-deb dpkg-source make; do
    command -v "$program" >/dev/null || { echo "$program is missing: this needs Debian and dpkg-dev" >&2; exit 3; }
done
mkdir -p "$cache"
exec 9>"$cache/kubernetes.lock"
flock 9

latest=$(find "$cache" -maxdepth 2 -path '*/kubernetes-*/complete' -printf '%h\n' | sort -V | tail -1)
if [ -n "$latest" ] && [ "${1:-}" != --fresh ]; then echo "$latest"; exit 0; fi

work=$(mktemp -d "$cache/building.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
{
    # Debian's own archives, as this machine reaches them, with their sources.
    mkdir -p "$work"/{sources,lists/partial,packages,tools,go/src/k8s.io}
    for file in /etc/apt/sources.list.d/debian.sources; do
        [ -f "$file" ] && sed 's/^Types: *deb *$/Types: deb deb-src/' "$file" >"$work/sources/debian.sources"
    done
    grep -sh '^deb ' /etc/apt/sources.list | sed 'p; s/^deb /deb-src /' >"$work/sources/debian.list" || true
    apt=(apt-get -q -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
        -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User= -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=")
    "${apt[@]}" update
    cd "$work/packages"
    "${apt[@]}" download golang-1.19-go golang-1.19-src etcd-server golang-github-modern-go-reflect2-dev \
        rsync libpopt0 libxxhash0
    for package in *.deb; do dpkg-deb -x "$package" "$work/tools"; done
    "${apt[@]}" source --download-only kubernetes
    description=$(echo kubernetes_*.dsc)
    version=${description#kubernetes_}; version=${version%.dsc}
    dpkg-source --no-check -x "$description" "$work/go/src/k8s.io/kubernetes"

    # Version 1.0.1 of this library, which is in vendor/, crashes under Go 1.18 and later when a CRD is made.
    vendored=$work/go/src/k8s.io/kubernetes/vendor/github.com/modern-go/reflect2
    rm "$vendored"/*.go "$vendored"/*.s
    cp "$work"/tools/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$vendored/"
    rm -f "$vendored"/*_test.go
    printf '%s\n' "KUBE_GIT_COMMIT=''" "KUBE_GIT_TREE_STATE='clean'" "KUBE_GIT_VERSION='v1.20.2'" "KUBE_GIT_MAJOR='1'" \
        "KUBE_GIT_MINOR='20'" >"$work/version"
    # The compiler's package links to folders of another one, by relative links.
    cp -rL "$work/tools/usr/lib/go-1.19" "$work/goroot"
    cd "$work/go/src/k8s.io/kubernetes"
    LD_LIBRARY_PATH=$(echo "$work"/tools/usr/lib/*-linux-gnu) PATH=$work/goroot/bin:$work/tools/usr/bin:$PATH GOROOT=$work/goroot GOPATH=$work/go GOCACHE=$work/gocache GO111MODULE=off GOPROXY=off \
        GOFLAGS= CGO_ENABLED=0 KUBE_GIT_VERSION_FILE=$work/version \
        make WHAT="cmd/kube-apiserver cmd/kube-controller-manager"

    made=$cache/kubernetes-$version
    rm -rf "$made.part" "$made"
    mkdir "$made.part"
    cp _output/local/go/bin/kube-apiserver _output/local/go/bin/kube-controller-manager "$work/tools/usr/bin/etcd" "$made.part/"
    touch "$made.part/complete"
    mv "$made.part" "$made"
} >&2
echo "$made"
