"""The other servers, each as its own documentation tells to write it; run in an environment of their own."""
