// A device that is not the CPU, for machines without one: torch's PrivateUse1, whose memory is the process's own.
//
//   an operator       runs on copies on the CPU (torch's cpu_fallback)
//   a CPU tensor      beside one of the device is refused, as CUDA does
//   fresh memory      is full of ones, which are NaN: who reads what nobody wrote is seen
//   host_waits()      how often a copy or a number made this thread wait for the device, since it was last asked
//   on_wait(f)        from now on each of these calls f, on the thread that waits; None: no longer
//   peak_bytes()      the most memory that was in use at once, over all threads, since it was last asked
//   a copy to the CPU that is not waited for comes when an event after it is synchronised; NaN is there until then
//
// Random numbers, convolutions, recurrent layers and running statistics of batch norms are left out.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;

thread_local int current = 0;
thread_local int on_the_cpu = 0;
thread_local long waits = 0;
PyObject* told = nullptr;  // called at each wait

void wait_of_the_host() {
  if (on_the_cpu) return;
  waits++;
  py::gil_scoped_acquire held;
  if (told) py::reinterpret_borrow<py::object>(told)();
}

// ---- memory, devices, streams ----------------------------------------------------------------------------------------

std::atomic<long> in_use{0}, peak{0};
constexpr size_t HEAD = 64;  // before each block, for its size

void release(void* memory) {
  if (!memory) return;
  void* block = static_cast<char*>(memory) - HEAD;
  in_use -= *static_cast<long*>(block);
  std::free(block);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    char* memory = nullptr;
    if (bytes) {
      void* block = std::aligned_alloc(HEAD, (bytes + 2 * HEAD - 1) / HEAD * HEAD);
      *static_cast<long*>(block) = bytes;
      memory = static_cast<char*>(block) + HEAD;
      std::memset(memory, 0xff, bytes);
      long now = in_use += bytes;
      for (long most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
      }
    }
    return {memory, memory, &release, c10::Device(DEVICE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

std::deque<std::pair<at::Tensor, at::Tensor>> coming;  // to the CPU: where to, and the values
uintptr_t sent = 0, arrived = 0;
std::mutex coming_lock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device getDevice() const override { return {DEVICE, static_cast<c10::DeviceIndex>(current)}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    current = device.index();
    return before;
  }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard held(coming_lock);
    *event = reinterpret_cast<void*>(sent);
  }
  void block(void*, const c10::Stream&) const override {}
  void synchronizeEvent(void* event) const override {
    std::lock_guard held(coming_lock);
    for (; !coming.empty() && arrived < reinterpret_cast<uintptr_t>(event); arrived++, coming.pop_front())
      coming.front().first.copy_(coming.front().second);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  at::Device getDeviceFromPtr(void*) const override { return {DEVICE, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr fresh = allocator.allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept && storage.data()) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

Hooks hooks;

// ---- operators of its own: what makes, copies and views memory ---------------------------------------------------------

using Sizes = c10::SymIntArrayRef;
template <class T>
using Maybe = std::optional<T>;

struct On {  // the device on which memory is made
  c10::DeviceGuard guard;
  explicit On(Maybe<at::Device> device)
      : guard(at::Device(DEVICE, device && device->has_index() ? device->index() : current)) {}
};

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(Sizes sizes, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device> device, Maybe<bool>,
                 Maybe<at::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
                         Maybe<at::Device> device, Maybe<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &allocator,
                                           KEYS, c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) {  // the same memory
  if (tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype());
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!non_blocking && from.device().type() != to.device().type()) wait_of_the_host();
  if (non_blocking && to.is_cpu()) {
    std::lock_guard held(coming_lock);
    coming.emplace_back(to, on_cpu(from).clone());
    sent++;
    std::memset(to.data_ptr(), 0xff, to.nbytes());
    return to;
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& tensor) {
  wait_of_the_host();
  return on_cpu(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, Sizes sizes, Maybe<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(sizes), std::nullopt, true);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, Sizes sizes, Sizes strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  c10::SymInt numel = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, storage, 0, {numel}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& other) {
  return set_storage(tensor, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}

bool is_set_to(const at::Tensor& a, const at::Tensor& b) {
  bool same = a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
  return same && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

at::Tensor view(const at::Tensor& tensor, Sizes sizes) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes)); }

at::Tensor as_strided(const at::Tensor& tensor, Sizes sizes, Sizes strides, Maybe<c10::SymInt> offset) {
  Maybe<int64_t> at = offset ? Maybe<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  auto size = C10_AS_INTARRAYREF_SLOW(sizes), stride = C10_AS_INTARRAYREF_SLOW(strides);
  return at::native::as_strided_tensorimpl(tensor, size, stride, at);
}

at::Tensor reshape_alias(const at::Tensor& tensor, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

// ---- all others ------------------------------------------------------------------------------------------------------

const std::set<std::string> MIXED{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const std::string name = operation.schema().name();
  Maybe<at::Tensor> far;
  bool here = false;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    here |= tensor.is_privateuseone();
    if (tensor.is_cpu() && tensor.dim() > 0) far = tensor;
  };
  for (const c10::IValue& given : torch::jit::last(*stack, operation.schema().arguments().size())) {
    if (given.isTensor()) see(given.toTensor());
    if (given.isTensorList())
      for (const at::Tensor& tensor : given.toTensorVector()) see(tensor);
  }
  TORCH_CHECK(!(here && far && !MIXED.count(name)), name, " is given a CPU tensor of shape ", far ? far->sizes() : at::IntArrayRef(),
              " beside one of the device");
  on_the_cpu++;
  try {
    at::native::cpu_fallback(operation, stack);
  } catch (...) {
    on_the_cpu--;
    throw;
  }
  on_the_cpu--;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("is_set_to", is_set_to);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
}

long host_waits() { return std::exchange(waits, 0); }

void on_wait(py::object call) {
  Py_XDECREF(told);
  told = call.is_none() ? nullptr : call.release().ptr();
}

long peak_bytes() { return peak.exchange(in_use); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("host_waits", host_waits);
  m.def("on_wait", on_wait);
  m.def("peak_bytes", peak_bytes);
  m.def("current_device", [] { return current; });
}
