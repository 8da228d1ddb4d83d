// A CUDA device that computes on the CPU, for builds of PyTorch without CUDA; `simulated_gpu.py` is its face.
//
// Its tensors are real ones of device `cuda:N`: dispatch, autograd's threads, autocast and errors about mixed devices are
// PyTorch's own. Every operation runs as the CPU's kernel on the same memory. Memory is counted, and has an end; streams
// run at once, and events keep the time.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

constexpr auto GPU = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 16;
constexpr size_t ROUNDING = 512;  // of allocations [bytes], as in CUDACachingAllocator

int num_devices = 1;
thread_local DeviceIndex current_device = 0;

// ---- Memory -------------------------------------------------------------------------------------------------------

struct Memory {
  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, limit = SIZE_MAX;
};
std::array<Memory, MOST_DEVICES> memories;
std::mutex memory_mutex;

struct Block {
  void* data;
  size_t size;
  DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    memories[block->device].allocated -= block->size;  // it stays reserved, as cached segments do
  }
  c10::free_cpu(block->data);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const Device device(GPU, current_device);
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, device};
    const size_t size = (num_bytes + ROUNDING - 1) / ROUNDING * ROUNDING;
    {
      std::lock_guard<std::mutex> lock(memory_mutex);
      auto& memory = memories[current_device];
      TORCH_CHECK_WITH(OutOfMemoryError, memory.allocated + size <= memory.limit, "CUDA out of memory. Tried to allocate ",
                       size, " bytes. GPU ", int(current_device), " has a total capacity of ", memory.limit,
                       " bytes of which ", memory.limit - memory.allocated, " bytes is free.");
      memory.allocated += size;
      memory.peak = std::max(memory.peak, memory.allocated);
      memory.reserved = std::max(memory.reserved, memory.allocated);
      memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
    }
    auto* block = new Block{c10::alloc_cpu(size), size, current_device};
    return {block->data, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
DeviceAllocator device_allocator;

std::map<const void*, size_t> pinned;
std::mutex pinned_mutex;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(1, num_bytes));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[data] = num_bytes;
    return {data, data, &release, Device(c10::kCPU)};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(data);
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
PinnedAllocator pinned_allocator;

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto data = device_allocator.allocate(num_bytes);
  if (num_bytes && storage.nbytes()) {
    std::memcpy(data.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
}

// ---- Devices, streams, events -------------------------------------------------------------------------------------

thread_local std::array<c10::StreamId, MOST_DEVICES> current_streams{};
std::atomic<c10::StreamId> last_stream{0};

struct Event {
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return GPU; }
  Device exchangeDevice(Device device) const override {
    const Device before(GPU, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(GPU, ::current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return stream(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, ++last_stream); }
  c10::Stream getNewStream(Device device, int) const override { return stream(device, ++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(num_devices); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    const auto passed = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static c10::Stream stream(Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(GPU, index(device)), id);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- Generators ---------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
      : c10::GeneratorImpl(Device(GPU, device), DispatchKeySet(DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(67280421310721)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->inner.set_state(inner.get_state());
    return copy;
  }

  at::Generator inner;  // what the CPU's kernels draw from
};

at::Generator& default_generator(DeviceIndex device) {
  static std::array<at::Generator, MOST_DEVICES> all = [] {
    std::array<at::Generator, MOST_DEVICES> made;
    for (int i = 0; i < MOST_DEVICES; ++i) made[i] = at::make_generator<DeviceGenerator>(DeviceIndex(i));
    return made;
  }();
  return all[device < 0 ? current_device : device];
}

at::Generator& inner_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == GPU, "Expected a 'cuda' device type for generator but found '",
              generator.device(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// ---- Operations: the CPU's kernels on the same memory ---------------------------------------------------------------

Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(const_cast<void*>(storage.data()), Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(same), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

Tensor to_gpu(const Tensor& tensor, Device device) {
  const auto options = tensor.options().device(device);
  auto copy = tensor.is_non_overlapping_and_dense() ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                                    : at::empty(tensor.sizes(), options);
  as_cpu(copy).copy_(tensor);
  return copy;
}

struct Replayable {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  std::vector<Tensor> outputs;
};

struct Graph {
  std::vector<Replayable> operations;
  void replay();
};
Graph* capturing = nullptr;

bool takes_cpu_indices(const std::string& name) { return name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_"; }

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {}

  // With `into` results go there, and nothing is returned.
  std::vector<Tensor> run(const std::vector<Tensor>* into = nullptr) {
    const auto& schema = op_.schema();
    const size_t num = schema.arguments().size(), begin = stack_->size() - num;
    for (size_t i = 0; i < num; ++i) find_device((*stack_)[begin + i]);
    const c10::OptionalDeviceGuard guard(device_);
    bool has_generator = false;
    for (size_t i = 0; i < num; ++i) {
      auto& value = (*stack_)[begin + i];
      const auto& type = schema.arguments()[i].type();
      if (*type == *c10::OptionalType::create(c10::GeneratorType::get())) {
        has_generator = true;
        value = inner_of(value.isNone() ? default_generator(device().index()) : value.toGenerator());
      } else {
        value = on_cpu(value);
      }
    }
    if (has_generator || !op_.hasTag(at::Tag::nondeterministic_seeded)) {
      compute();
    } else {  // draws from the CPU's generator, which has to have this device's state for that time
      auto cpu = at::detail::getDefaultCPUGenerator();
      auto& own = inner_of(default_generator(device().index()));
      const auto before = cpu.get_state();
      cpu.set_state(own.get_state());
      compute();
      own.set_state(cpu.get_state());
      cpu.set_state(before);
    }
    for (auto& [alias, original] : aliases_) take_over_size(alias, original);
    std::vector<Tensor> made;
    const size_t first = stack_->size() - schema.returns().size();
    for (size_t i = first; i < stack_->size(); ++i) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = result(value.toTensor(), made, into);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& one : value.toTensorVector()) list.push_back(result(one, made, into));
        value = list;
      }
    }
    return made;
  }

 private:
  void compute() { op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_); }

  Device device() const { return device_.value_or(Device(GPU, current_device)); }

  void find_device(const IValue& value) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (!tensor.defined()) return;
      if (tensor.is_cuda()) {
        if (!device_) device_ = tensor.device();
        check(tensor.device());
      } else if (tensor.dim() > 0 && !takes_cpu_indices(op_.schema().name())) {
        has_cpu_ = true;
      }
      if (has_cpu_ && device_) check(Device(c10::kCPU));
    } else if (value.isList()) {
      for (const IValue& one : value.toListRef()) find_device(one);
    } else if (value.isDevice() && value.toDevice().type() == GPU && !device_) {
      device_ = Device(GPU, value.toDevice().index() < 0 ? current_device : value.toDevice().index());
    }
  }

  void check(Device other) const {
    TORCH_CHECK(other == *device_, "Expected all tensors to be on the same device, but found at least two devices, ",
                *device_, " and ", other, "! (", op_.schema().name(), ")");
  }

  IValue on_cpu(const IValue& value) {
    if (value.isTensor()) return alias_of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorVector()) list.push_back(alias_of(one));
      return list;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::impl::GenericList list(value.toList().elementType());
      for (const IValue& one : value.toListRef()) list.push_back(on_cpu(one));
      return list;
    }
    if (value.isDevice()) return Device(c10::kCPU);
    return value;
  }

  Tensor alias_of(const Tensor& tensor) {
    auto alias = as_cpu(tensor);
    if (tensor.defined() && tensor.is_cuda()) aliases_.emplace_back(alias, tensor);
    return alias;
  }

  static void take_over_size(const Tensor& alias, const Tensor& original) {  // an `out` that a kernel has resized
    const bool is_moved = alias.storage().data() != original.storage().data();
    if (is_moved) {
      resize_storage(original.storage(), alias.storage().nbytes());
      std::memcpy(original.storage().mutable_data(), alias.storage().data(), alias.storage().nbytes());
    }
    if (is_moved || alias.sizes() != original.sizes() || alias.strides() != original.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  Tensor result(const Tensor& tensor, std::vector<Tensor>& made, const std::vector<Tensor>* into) {
    if (!tensor.defined()) return tensor;
    for (auto& [alias, original] : aliases_) {
      if (alias.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return original;
    }
    for (auto& [alias, original] : aliases_) {
      if (tensor.storage().data() != nullptr && tensor.storage().data() == original.storage().data()) {  // a view
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(original.storage()), DispatchKeySet(DispatchKey::CUDA), tensor.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        return view;
      }
    }
    if (into != nullptr) {
      const auto& there = (*into)[made.size()];
      as_cpu(there).copy_(tensor);
      made.push_back(there);
      return there;
    }
    made.push_back(to_gpu(tensor, device()));
    return made.back();
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  std::optional<Device> device_;
  bool has_cpu_ = false;
  std::vector<std::pair<Tensor, Tensor>> aliases_;
};

void on_cpu_kernels(const c10::OperatorHandle& op, Stack* stack) {
  if (capturing == nullptr) {
    Call(op, stack).run();
    return;
  }
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  const auto outputs = Call(op, stack).run();
  capturing->operations.push_back({op, arguments, outputs});
}

void Graph::replay() {
  for (auto& one : operations) {
    Stack stack(one.arguments);
    Call(one.op, &stack).run(&one.outputs);
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  as_cpu(self).copy_(as_cpu(source));
  if (capturing != nullptr) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    capturing->operations.push_back({op, {IValue(self), IValue(source), IValue(false)}, {}});
  }
  return self;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

void record_stream(Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu_kernels>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", copy_);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
}

// ---- Processes: NCCL's collectives of these tensors, by another backend's of the same memory --------------------------

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(IValue(tensors_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return tensors_; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class PendingWork final : public c10d::Work {  // of one process with another, which may wait for this one
 public:
  PendingWork(c10::intrusive_ptr<c10d::Work> inner, std::vector<Tensor> tensors)
      : inner_(std::move(inner)), tensors_(std::move(tensors)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }
  void synchronize() override { inner_->wait(); }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::vector<Tensor> tensors_;
};

class Collectives final : public c10d::Backend {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& o) override {
    auto t = cpu(tensors);
    return done(inner_->broadcast(t, o), tensors);
  }
  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& o) override {
    auto t = cpu(tensors);
    return done(inner_->allreduce(t, o), tensors);
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                    const c10d::AllgatherOptions& o) override {
    auto out = cpu(outputs);
    auto in = cpu(inputs);
    return done(inner_->allgather(out, in, o), outputs[0]);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& o) override {
    auto out = cpu(output), in = cpu(input);
    return done(inner_->_allgather_base(out, in, o), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::AllgatherOptions& o) override {
    auto out = cpu(outputs), in = cpu(inputs);
    return done(inner_->allgather_into_tensor_coalesced(out, in, o), outputs);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    auto out = cpu(output), in = cpu(input);
    return done(inner_->_reduce_scatter_base(out, in, o), {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    auto out = cpu(outputs), in = cpu(inputs);
    return done(inner_->reduce_scatter_tensor_coalesced(out, in, o), outputs);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& o) override {
    auto out = cpu(output), in = cpu(input);
    return done(inner_->alltoall_base(out, in, out_sizes, in_sizes, o), {output});
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return done(inner_->barrier(o), {}); }
  WorkPtr send(std::vector<Tensor>& tensors, int to, int tag) override {
    auto t = cpu(tensors);
    return c10::make_intrusive<PendingWork>(inner_->send(t, to, tag), both(t, tensors));
  }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int tag) override {
    auto t = cpu(tensors);
    return c10::make_intrusive<PendingWork>(inner_->recv(t, from, tag), both(t, tensors));
  }

 private:
  static Tensor cpu(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "NCCL takes tensors of a GPU, not of ", tensor.device());
    return as_cpu(tensor);
  }
  template <class T>
  static std::vector<T> cpu(const std::vector<T>& each) {
    std::vector<T> all;
    for (const auto& one : each) all.push_back(cpu(one));
    return all;
  }
  static std::vector<Tensor> both(std::vector<Tensor> ones, const std::vector<Tensor>& others) {
    ones.insert(ones.end(), others.begin(), others.end());
    return ones;
  }
  static WorkPtr done(const WorkPtr& work, std::vector<Tensor> tensors) {
    work->wait();
    return c10::make_intrusive<DoneWork>(std::move(tensors));
  }
  c10::intrusive_ptr<c10d::Backend> inner_;
};

struct HostTimer final : c10d::Timer {  // of DistributedDataParallel: when each pass began and ended
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to && *from <= *to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

Memory& memory_of(int device) {
  TORCH_CHECK(0 <= device && device < num_devices, "CUDA error: invalid device ordinal");
  return memories[device];
}

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)
}

namespace at {

struct SimulatedHooks final : CUDAHooksInterface {
  void init() const override {}
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<DeviceGenerator>(device < 0 ? ::current_device : device);
  }
  Device getDeviceFromPtr(void*) const override { return Device(GPU, ::current_device); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto after = pinned.upper_bound(data);
    if (after == pinned.begin()) return false;
    --after;
    return static_cast<const char*>(data) < static_cast<const char*>(after->first) + std::max<size_t>(1, after->second);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(num_devices); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  int getNumGPUs() const override { return num_devices; }
  void deviceSynchronize(DeviceIndex) const override {}
};
static_assert(sizeof(SimulatedHooks) == sizeof(CUDAHooksInterface), "hooks are replaced in place");

// PyTorch asks for its hooks while it is imported, and keeps those of a build without CUDA: they get other methods here.
void replace_hooks() {
  new (const_cast<CUDAHooksInterface*>(&detail::getCUDAHooks())) SimulatedHooks();
}

}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::replace_hooks();
  m.def("set_devices", [](int count, size_t limit) {
    TORCH_CHECK(1 <= count && count <= MOST_DEVICES, "1 to ", MOST_DEVICES, " devices, not ", count);
    num_devices = count;
    for (auto& memory : memories) memory.limit = limit;
  });
  m.def("memory", [](int device) {
    const auto& m = memory_of(device);
    return std::vector<size_t>{m.allocated, m.peak, m.reserved, m.peak_reserved, m.limit};
  });
  m.def("empty_cache", [](int device) { memory_of(device).reserved = memory_of(device).allocated; });
  m.def("reset_peak", [](int device) {
    auto& m = memory_of(device);
    m.peak = m.allocated;
    m.peak_reserved = m.reserved;
  });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int device) { Guard().setDevice(Device(GPU, DeviceIndex(device))); });
  m.def("generator", [](int device) { return default_generator(DeviceIndex(device)); });
  m.def("resize_storage", [](py::object storage, size_t size) { resize_storage(torch::createStorage(storage.ptr()), size); });
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(inner);
  });
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](Graph& graph) { graph.operations.clear(); capturing = &graph; })
      .def("end", [](Graph&) { capturing = nullptr; })
      .def("replay", &Graph::replay)
      .def("reset", [](Graph& graph) { graph.operations.clear(); });
}
