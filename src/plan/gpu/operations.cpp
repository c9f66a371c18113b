// LibTorch's operations on a planned GPU: results get sizes and addresses, and a launch is counted.

#include <set>
#include <unordered_map>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include "observe/operation_costs.h"
#include "plan/gpu/gpu_shapes.h"
#include "plan/gpu/planned_gpu.h"
#include "plan/gpu/stand_ins.h"
#include "titan/core/error.h"

namespace titan::plan {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// ---- results

at::Tensor result_for(const at::Tensor& shape, const StandIns& arguments) {
  bool is_new = false;
  return shape.defined() && shape.is_meta() ? result_for(shape, arguments, c10::Device(at::kCUDA, 0), is_new)
                                            : shape;
}

IValue result_for(const IValue& value, const StandIns& arguments) {
  if (value.isTensor()) return result_for(value.toTensor(), arguments);
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& shape : value.toTensorVector()) list.push_back(result_for(shape, arguments));
  return list;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool returns_only_its_arguments(const c10::FunctionSchema& schema) {
  return std::ranges::all_of(schema.returns(), writes);
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// The properties of an operator, for all its calls.
struct KnownOperator {
  std::string name;  // its launches are counted under it
  const ShapeRule* shapes = nullptr;
  bool is_product = false;  // by cuBLAS
  train::Operation costs;
};

KnownOperator known_operator(const c10::OperatorHandle& op) {
  static const std::set<std::string> products = {
      "aten::mm",    "aten::addmm",   "aten::addmm_",    "aten::_addmm_activation",
      "aten::bmm",   "aten::baddbmm", "aten::baddbmm_",  "aten::mv",
      "aten::addmv", "aten::dot",     "aten::_scaled_mm"};
  const c10::FunctionSchema& schema = op.schema();
  const std::string& overload = schema.overload_name();
  const ShapeRule* rule = gpu_shape_rule(schema.name() + (overload.empty() ? "" : "." + overload));
  return {.name = schema.name() + (overload.starts_with("dtype") ? ".dtype" : ""),
          .shapes = rule ? rule : shape_rule(schema.name()),
          .is_product = products.contains(schema.name()),
          .costs = train::Operation(schema, c10::kCUDA)};
}

const KnownOperator& known(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto& operators = *new std::unordered_map<c10::OperatorName, KnownOperator>;
  const std::lock_guard lock(mutex);
  const auto found = operators.find(op.operator_name());
  return found != operators.end() ? found->second
                                  : operators.emplace(op.operator_name(), known_operator(op)).first->second;
}

// ---- a call

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), known_(known(op)), stack_(*stack) {
    base_ = stack_.size() - schema_.arguments().size();
  }

  void run() {
    PlannedGpu& gpu = PlannedGpu::get();
    for (size_t i = base_; i < stack_.size(); ++i)
      if (stack_[i].isTensor() && stack_[i].toTensor().is_cuda()) gpu.reads(stack_[i].toTensor());
    const std::span<const IValue> inputs(stack_.data() + base_, schema_.arguments().size());
    // Taken and given back, so that peaks have it.
    std::optional<Temporaries> temporaries;
    if (!gpu.device().is_cpu)
      temporaries.emplace(schema_.name(), inputs, gpu.device().multiprocessors,
                          gpu.device().compute_capability);
    StandIns shapes(StandIns::Kind::meta);
    const Stack of_results = shapes_of_results(shapes);
    resize_outputs(shapes);
    Stack results;
    for (const IValue& value : of_results) results.push_back(result_for(value, shapes));
    if (known_.is_product) gpu.take_workspaces(known_.name == "aten::_scaled_mm");
    if (gpu.device().is_cpu) widen_as_a_cpu(inputs);
    if (temporaries) temporaries->take_rest();
    temporaries.reset();
    train::OperationCost cost = known_.costs.of_inputs(inputs);
    known_.costs.add_outputs(results, cost);
    gpu.launch({.name = known_.name,
                .flops = cost.flops,
                .bytes_read = cost.bytes_read,
                .bytes_written = cost.bytes_written,
                .dtype = cost.dtype,
                .shape = cost.shape});
    if (gpu.device().is_cpu && known_.name.ends_with(".dtype"))
      allocate_as_a_cpu(results[0].toTensor(), inputs[1].toTensor().scalar_type());
    raise_versions_of_lists(schema_, inputs, gpu.device().is_cpu);
    stack_.resize(base_);
    for (IValue& value : results) stack_.push_back(std::move(value));
  }

 private:
  // CPUs have no product into a wider type: the result is rounded (ops/linear.cpp), and widened when it is added.
  static void allocate_as_a_cpu(const at::Tensor& result, at::ScalarType factors) {
    const at::Tensor product = at::empty(result.sizes(), result.options().dtype(factors)),
                     widened = at::empty(result.sizes(), result.options());
  }

  // A CPU's pointwise operations on two dtypes copy one into the wider type, which a GPU's needn't (TensorIterator.cpp).
  void widen_as_a_cpu(std::span<const IValue> inputs) const {
    static const std::set<std::string> binary = {"aten::add", "aten::add_", "aten::sub", "aten::sub_",
                                                 "aten::mul", "aten::mul_", "aten::div", "aten::div_"};
    if (!binary.contains(schema_.name()) || !inputs[0].isTensor() || !inputs[1].isTensor()) return;
    const at::Tensor a = inputs[0].toTensor(), b = inputs[1].toTensor();
    if (a.dim() == 0 || b.dim() == 0) return;  // numbers
    const at::ScalarType common = c10::promoteTypes(a.scalar_type(), b.scalar_type());
    std::vector<at::Tensor> copies;
    for (const at::Tensor& each : {a, b})
      if (each.is_cuda() && each.scalar_type() != common)
        copies.push_back(at::empty(each.sizes(), each.options().dtype(common)));
  }

  Stack arguments_with(StandIns& stand_ins) const {
    Stack result;
    for (size_t i = base_; i < stack_.size(); ++i) result.push_back(stand_ins.stand_in(stack_[i]));
    return result;
  }

  Stack shapes_of_results(StandIns& shapes) const {
    Stack arguments = arguments_with(shapes);
    if (known_.shapes) return (*known_.shapes)(arguments);
    if (op_.hasComputedKernelForDispatchKey(DispatchKey::Meta)) {
      try {
        op_.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &arguments);
        return arguments;
      } catch (const c10::NotImplementedError&) {
        shapes = StandIns(StandIns::Kind::meta);  // the attempt may have resized some
        arguments = arguments_with(shapes);
      }
    }
    // An operation that only changes its arguments needs no shapes, unless it resizes them.
    if (!returns_only_its_arguments(schema_) ||
        std::ranges::any_of(schema_.arguments(), [](const c10::Argument& a) { return a.is_out(); }))
      throw Error(
          str("a plan can't tell the sizes of the results of ", schema_.name(),
              ", which LibTorch finds by computing; use an operation whose sizes follow from those of its "
              "arguments"));
    Stack results;
    for (size_t i = 0; i < arguments.size() && results.size() < schema_.returns().size(); ++i)
      if (writes(schema_.arguments()[i])) results.push_back(arguments[i]);
    return results;
  }

  // The meta kernel has resized its outputs as a GPU's kernel would.
  static void resize_outputs(const StandIns& shapes) {
    for (const auto& [mine, other] : shapes.pairs()) {
      if (mine.sizes() == other.sizes() && mine.strides() == other.strides()) continue;
      at::native::resize_output(mine, other.sizes());
      if (mine.strides() != other.strides())
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides());
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const KnownOperator& known_;
  Stack& stack_;
  size_t base_ = 0;
};

void run_operation(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

// The CPU's kernels of views look at sizes only.
void run_view(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}

// ---- operations on memory

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kCUDA), DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::kCUDA),
                                           DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == sizes) return self;
  impl->set_sizes_contiguous(sizes);
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(),
                                                                  static_cast<size_t>(self.storage_offset()));
  if (bytes <= storage->nbytes()) return self;
  storage->set_data_ptr_noswap(c10::GetAllocator(c10::kCUDA)->allocate(bytes));
  storage->set_nbytes(bytes);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  PlannedGpu::get().record_stream(reinterpret_cast<uintptr_t>(self.storage().data()), stream.id());
}

void wait_for_current_stream() { PlannedGpu::get().host_waits_for_stream(current_stream()); }

int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>&, double, bool is_causal, std::optional<double>,
                         bool is_grouped) {
  return attention_backend(q, k, v, is_causal, is_grouped, PlannedGpu::get().device().compute_capability);
}

double bytes_of(const at::Tensor& tensor) { return static_cast<double>(tensor.nbytes()); }

constexpr size_t kReadByHost = size_t{1} << 20;

// A copy between the host and the device goes through contiguous tensors of one dtype, as LibTorch's does
// (copy_requires_temporaries in ATen/native/cuda/Copy.cu).
// The host waits, unless that is unnecessary (non_blocking) and possible, as its memory is pinned.
void copy_across(const at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_device = self.is_cuda();
  const bool is_same_dtype = self.scalar_type() == source.scalar_type();
  if (self.is_contiguous() && source.is_contiguous() && is_same_dtype && self.sizes() == source.sizes()) {
    PlannedGpu::get().launch({.name = to_device ? kCopyToDevice : kCopyToHost,
                              .bytes_read = bytes_of(source),
                              .bytes_written = bytes_of(self)});
    // Small ones may be read by the host; the memory of large ones is never touched, so it takes none.
    if (!to_device && self.nbytes() <= kReadByHost) self.zero_();
    if (!non_blocking || !(to_device ? source : self).is_pinned()) wait_for_current_stream();
    return;
  }
  if (to_device) {
    const at::Tensor from = source.to(self.scalar_type()).expand_as(self).contiguous();
    const at::Tensor to = self.is_contiguous() ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
    copy_across(to, from, non_blocking);
    if (!to.is_same(self)) at::Tensor(self).copy_(to);
  } else {
    const at::Tensor from = source.expand_as(self).contiguous();
    const at::Tensor to = self.is_contiguous() && is_same_dtype
                              ? self
                              : at::empty(self.sizes(), self.options().dtype(source.scalar_type()));
    copy_across(to, from, non_blocking);
    if (!to.is_same(self)) at::Tensor(self).copy_(to);
  }
}

at::Scalar read_on_host(const at::Tensor& self) {
  const at::Tensor value = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_across(value, self, /*non_blocking=*/false);
  return value.item();
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (!self.is_cuda() || !source.is_cuda()) {
    copy_across(self, source, non_blocking);
    return self;
  }
  PlannedGpu::get().launch({.name = is_one_memcpy(self, source) ? "cudaMemcpyAsync" : "aten::copy_",
                            .bytes_read = bytes_of(source),
                            .bytes_written = bytes_of(self)});
  return self;
}

// ---- registration

struct Listed {
  const char* library;
  DispatchKey key;
  void (*define)(torch::Library&);
};

std::vector<Listed>& listed() {
  static std::vector<Listed> operations;
  return operations;
}

const std::set<std::string>& own_operations() {
  static const std::set<std::string> names = {
      "aten::empty", "aten::empty_strided",       "aten::resize_",          "aten::record_stream",
      "aten::copy_", "aten::_local_scalar_dense", "aten::_fused_sdp_choice"};
  return names;
}

// Whether LibTorch has a kernel for GPUs: where the CPU has one of its own, and for operations on lists of tensors.
bool has_gpu_kernel(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const std::string& overload = op.schema().overload_name();
  return op.hasKernelForDispatchKey(DispatchKey::CPU) || name.starts_with("aten::_foreach_") ||
         gpu_shape_rule(name + (overload.empty() ? "" : "." + overload));
}

// The CPU's kernel of set_ doesn't touch memory either.
bool only_looks_at_sizes(const c10::FunctionSchema& schema) {
  return returns_a_view(schema) || schema.name() == "aten::set_" || schema.name() == "aten::is_set_to";
}

// Never undone, because the dispatcher may be destroyed first.
void install_operations() {
  static auto& handles = *new std::vector<c10::RegistrationHandleRAII>;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::") || own_operations().contains(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !has_gpu_kernel(*op)) continue;
    handles.push_back(dispatcher.registerImpl(
        name, DispatchKey::CUDA,
        only_looks_at_sizes(op->schema()) ? c10::KernelFunction::makeFromBoxedFunction<&run_view>()
                                          : c10::KernelFunction::makeFromBoxedFunction<&run_operation>(),
        std::nullopt, nullptr, "planned GPU"));
  }
}

}  // namespace

bool list_operations(const char* library, DispatchKey key, void (*define)(torch::Library&)) {
  listed().push_back({library, key, define});
  return true;
}

void register_operations() {
  install_operations();
  static auto* own = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  own->impl("empty.memory_format", TORCH_FN(empty));
  own->impl("empty_strided", TORCH_FN(empty_strided));
  own->impl("resize_", TORCH_FN(resize));
  own->impl("record_stream", TORCH_FN(record_stream));
  own->impl("copy_", TORCH_FN(copy));
  own->impl("_local_scalar_dense", TORCH_FN(read_on_host));
  own->impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  static auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;
  for (const Listed& each : listed()) {
    libraries.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, each.library, each.key, __FILE__, __LINE__));
    each.define(*libraries.back());
  }
}

}  // namespace titan::plan
