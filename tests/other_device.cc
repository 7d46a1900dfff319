// A stand-in device for machines without a GPU. It has PyTorch's type for external devices, is
// named "other", and uses the memory and kernels of the CPU. Like a GPU, it rejects operators with
// tensors on two devices, and random numbers from a different device's generator. It therefore
// reveals tensors that were left on the CPU. It is loaded as a shared library.
//
// It differs from other external devices, and resembles a GPU, in two ways: parameters moved to it
// stay the same tensors (Module::to in C++), and convolutions need no separate kernel.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace gnomon::testing {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    void* const data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (data == nullptr) throw std::bad_alloc();
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Allocator allocator;

// There is one device with one stream. Work completes immediately, and events record times.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*device*/) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& /*data*/,
                             const c10::Stream& /*stream*/) const override {}

  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  double elapsedTime(void* first, void* last, c10::DeviceIndex /*device*/) const override {
    const auto at = [](void* event) { return *static_cast<Clock::time_point*>(event); };
    return std::chrono::duration<double, std::milli>(at(last) - at(first)).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The CPU's generator, which reports CPU as its device only while a CPU kernel uses it.
class RandomNumbers final : public at::CPUGeneratorImpl {
 public:
  explicit RandomNumbers(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    SetDevice(kDevice);
  }
  void SetDevice(c10::Device device) { device_ = device; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    static const at::Generator generator = at::make_generator<RandomNumbers>();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
    return at::make_generator<RandomNumbers>();
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
};

at::Tensor Empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor EmptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                        std::optional<at::Device> /*device*/, std::optional<bool> /*pinned*/) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

// Returns a CPU tensor that shares the memory.
at::Tensor OnCpu(const at::Tensor& tensor) {
  if (tensor.is_cpu() || !tensor.defined()) return tensor;
  auto* const data = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  at::Tensor view =
      at::from_blob(data + tensor.storage_offset() * tensor.element_size(), tensor.sizes(),
                    tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  OnCpu(to).copy_(OnCpu(from));
  return to;
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return CopyFrom(from, to, false);
}

at::Scalar Item(const at::Tensor& tensor) { return OnCpu(tensor).item(); }

at::Tensor& SetStorage(at::Tensor& tensor, at::Storage storage, int64_t offset,
                       at::IntArrayRef size, at::IntArrayRef stride) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor ViewOf(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                  int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return view;
}

at::Tensor AsStrided(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<int64_t> offset) {
  return ViewOf(tensor, size, stride, offset.value_or(tensor.storage_offset()));
}

at::Tensor ReshapeAlias(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return ViewOf(tensor, size, stride, tensor.storage_offset());
}

// Returns the same view that the CPU returns.
at::Tensor View(const at::Tensor& tensor, at::IntArrayRef size) {
  const at::Tensor view = OnCpu(tensor).view(size);
  return ViewOf(tensor, view.sizes(), view.strides(), tensor.storage_offset());
}

const at::Tensor& Resize(const at::Tensor& tensor, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> /*format*/) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  int64_t numbers = 1;
  for (const int64_t n : size) numbers *= n;
  const auto bytes = static_cast<size_t>(numbers) * tensor.element_size();
  if (bytes > tensor.storage().nbytes()) {
    tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(allocator.allocate(bytes));
    tensor.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return tensor;
}

bool ParametersStay(const at::Tensor& /*tensor*/, const at::Tensor& /*from*/) { return true; }

void CheckHere(const char* name, std::initializer_list<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(!tensor.defined() || !tensor.is_cpu(), name,
                ": expected all tensors to be on the same device, found the CPU and another");
  }
}

at::Tensor Convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  CheckHere("convolution", {input, weight, bias.value_or(at::Tensor())});
  return at::convolution_symint(input.cpu(), weight.cpu(),
                                bias ? std::optional(bias->cpu()) : std::nullopt, stride, padding,
                                dilation, transposed, output_padding, std::move(groups))
      .to(kDevice);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ConvolutionBackward(
    const at::Tensor& d_output, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> needed) {
  CheckHere("convolution_backward", {d_output, input, weight});
  const c10::SymInt channels = d_output.sym_size(1);
  const auto [d_input, d_weight, d_bias] = at::convolution_backward_symint(
      d_output.cpu(), input.cpu(), weight.cpu(), c10::SymIntArrayRef(&channels, 1), stride, padding,
      dilation, transposed, output_padding, std::move(groups), needed);
  const auto here = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(kDevice) : tensor;
  };
  return {here(d_input), here(d_weight), here(d_bias)};
}

// Whether a GPU accepts CPU indices for this operator.
bool TakesIndicesOfTheCpu(const std::string& name) {
  static const std::set<std::string> names = {"aten::index", "aten::index_put", "aten::index_put_",
                                              "aten::_index_put_impl_"};
  return names.contains(name);
}

void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  // Scalars are accepted from any device. For gnomon's operators, this includes the dropout seed, a
  // tensor with one axis.
  const bool is_ours = name.starts_with("gnomon::");
  bool on_cpu = false;
  bool here = false;
  RandomNumbers* generator = nullptr;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const bool is_number = is_ours ? tensor.numel() == 1 : tensor.dim() == 0;
    here = here || !tensor.is_cpu();
    on_cpu = on_cpu || (tensor.is_cpu() && !is_number);
  };
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
    }
    if (value.isGenerator() && value.toGenerator().defined()) {
      generator = dynamic_cast<RandomNumbers*>(value.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(generator != nullptr, name, ": expected a generator of the other device");
    }
  }
  TORCH_CHECK(!(on_cpu && here) || TakesIndicesOfTheCpu(name), name,
              ": expected all tensors to be on the same device, found the CPU and another");
  if (generator != nullptr) generator->SetDevice(c10::kCPU);
  at::native::cpu_fallback(op, stack);
  if (generator != nullptr) generator->SetDevice(kDevice);
}

const bool kRegistered = [] {
  c10::SetAllocator(kType, &allocator);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  // With a name, the device becomes PyTorch's accelerator, even if PyTorch was built for CUDA.
  c10::register_privateuse1_backend("other");
  return true;
}();

// Tells gnomon that its operators run on this device.
TORCH_LIBRARY_IMPL(gnomon, PrivateUse1, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

// Under autocast, operators keep the dtypes of their tensors, except those that cast explicitly.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Without these, copying a conjugated or negated tensor would first make a copy of it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &Empty);
  m.impl("empty_strided", &EmptyStrided);
  m.impl("_copy_from", &CopyFrom);
  m.impl("_copy_from_and_resize", &CopyFromAndResize);
  m.impl("_local_scalar_dense", &Item);
  m.impl("set_.source_Storage_storage_offset", &SetStorage);
  m.impl("as_strided", &AsStrided);
  m.impl("_reshape_alias", &ReshapeAlias);
  m.impl("view", &View);
  m.impl("resize_", &Resize);
  m.impl("_has_compatible_shallow_copy_type", &ParametersStay);
  m.impl("convolution_overrideable", &Convolution);
  m.impl("convolution_backward_overrideable", &ConvolutionBackward);
}

}  // namespace
}  // namespace gnomon::testing
