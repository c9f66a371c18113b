// Kernels for aten's operations on CUDA: each is the CPU's kernel over the same memory, queued on the current stream. What the
// host must know at once, the shapes of results, comes from the operation's meta kernel or from a rule here.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <unordered_set>

#include "kernels/call.h"
#include "plan/gpu/shapes.h"
#include "runtime/faults.h"

namespace virtual_gpu {

void install_cuda_only_kernels();  // attention.cpp
void install_random_kernels();     // random.cpp
void watch_host_accesses();        // observers.cpp
void watch_modules();              // observers.cpp

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using titan::plan::shape_rule;
using titan::plan::ShapeRule;
using titan::plan::Temporaries;
using torch::jit::Stack;

// Results of a call: CUDA tensors for the caller, and those among them that are new and must be filled.
struct Results {
  Stack values;
  std::vector<at::Tensor> fresh;  // undefined where a result is an argument, or no tensor
};

// Gives every tensor of `shapes` its CUDA tensor.
Results results_for(const Stack& shapes, const StandIns& arguments, c10::Device device) {
  Results results;
  const auto result = [&](const at::Tensor& shape) {
    bool is_new = false;
    at::Tensor tensor = result_for(shape, arguments, device, is_new);
    results.fresh.push_back(is_new ? tensor : at::Tensor());
    return tensor;
  };
  for (const IValue& value : shapes) {
    if (value.isTensor()) {
      results.values.emplace_back(result(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(result(tensor));
      results.values.emplace_back(std::move(list));
    } else {
      results.values.push_back(value);
      results.fresh.emplace_back();
    }
  }
  return results;
}

bool returns_only_its_arguments(const c10::FunctionSchema& schema) {
  return std::ranges::all_of(
      schema.returns(), [](const c10::Argument& r) { return r.alias_info() && r.alias_info()->isWrite(); });
}
bool returns_only_tensors(const c10::FunctionSchema& schema) {
  return std::ranges::all_of(schema.returns(), [](const c10::Argument& r) {
    const auto kind = r.type()->kind();
    return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  });
}
bool writes(const c10::FunctionSchema& schema, size_t argument) {
  const auto* alias = schema.arguments()[argument].alias_info();
  return alias && alias->isWrite();
}

bool ignores_old_values(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::fill_",     "aten::zero_",    "aten::copy_",
                                                        "aten::normal_",   "aten::uniform_", "aten::random_",
                                                        "aten::bernoulli_"};
  return names.contains(name);
}

// The operations for which LibTorch calls cuBLAS.
bool is_product(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::mm",    "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", "aten::mv",
      "aten::addmv", "aten::dot"};
  return names.contains(name);
}

bool is_arithmetic(const std::string& name) {
  static const std::unordered_set<std::string> names = [] {
    std::unordered_set<std::string> all;
    for (const char* prefix : {"aten::", "aten::_foreach_"})
      for (const char* operation : {"add", "sub", "mul", "div"})
        for (const char* suffix : {"", "_"}) all.insert(std::string(prefix) + operation + suffix);
    return all;
  }();
  return names.contains(name);
}

// One operator call, from the host's side.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(*stack) {
    base_ = stack_.size() - schema_.arguments().size();
    device_ = device_of_arguments();
  }

  void run() {
    const c10::cuda::CUDAGuard guard(device_);
    replace_generator();
    round_learning_rate();
    StandIns shapes(StandIns::Kind::meta);
    const std::optional<Stack> known = shapes_of_results(shapes);
    if (!known) return run_at_once();
    const std::span<const IValue> inputs = std::span(stack_).subspan(base_);
    std::optional<Temporaries> temporaries(std::in_place, schema_.name(), inputs,
                                           at::cuda::getCurrentDeviceProperties()->multiProcessorCount,
                                           compute_capability());
    resize_outputs(shapes);
    const Results results = results_for(*known, shapes, device_);
    // LibTorch's own code takes cuBLAS's workspace for this stream from its allocator, at the first product.
    if (is_product(schema_.name())) at::cuda::getCurrentCUDABlasHandle();
    temporaries->take_rest();
    queue(results.fresh);
    temporaries.reset();
    titan::plan::raise_versions_of_lists(schema_, inputs, /*is_cpu=*/false);
    replace_arguments(results.values);
  }

 private:
  const IValue& argument(size_t i) const { return stack_[base_ + i]; }

  c10::Device device_of_arguments() const {
    std::optional<c10::Device> found;
    for (size_t i = 0; i < schema_.arguments().size() && !found; ++i) {
      for_each_tensor(argument(i), [&](const at::Tensor& t) {
        if (t.is_cuda() && !found) found = t.device();
      });
      if (argument(i).isDevice() && argument(i).toDevice().is_cuda() && argument(i).toDevice().has_index())
        found = argument(i).toDevice();
    }
    return found.value_or(c10::Device(at::kCUDA, at::cuda::current_device()));
  }

  // A CPU generator that depends on CUDA's seed and offset in place of CUDA's: the numbers repeat as CUDA's do, but
  // they are the CPU's.
  void replace_generator() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto type = schema_.arguments()[i].type();
      if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (type->kind() != c10::TypeKind::GeneratorType) continue;
      std::optional<at::Generator> given;
      if (!argument(i).isNone()) given = argument(i).toGenerator();
      auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
          given, at::cuda::detail::getDefaultCUDAGenerator(device_.index()));
      const std::lock_guard lock(generator->mutex_);
      const auto [seed, offset] = generator->philox_engine_inputs(4);
      stack_[base_ + i] = at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
    }
  }

  // CUDA's fused optimizers compute with an fp32 learning rate, except for float64 parameters; the CPU's with the host's double.
  void round_learning_rate() {
    if (!schema_.name().starts_with("aten::_fused_adam")) return;
    IValue& lr = stack_[base_ + static_cast<size_t>(*schema_.argumentIndexWithName("lr"))];
    const std::vector<at::Tensor> parameters = argument(0).toTensorVector();
    if (lr.isDouble() && !parameters.empty() && parameters.front().scalar_type() != at::kDouble)
      lr = static_cast<double>(static_cast<float>(lr.toDouble()));
  }

  // CUDA's kernels read a scalar on the device in the type of the other operand, if that has 16 bits; the CPU's take its own value. In products,
  // scalars of the host keep theirs on both. Lists of several types are left as they are. By places of arguments.
  std::vector<std::pair<size_t, at::ScalarType>> rounded_scalars() const {
    if (!is_arithmetic(schema_.name())) return {};
    std::set<at::ScalarType> types;  // scalars aside
    for (size_t i = 0; i < schema_.arguments().size(); ++i)
      if (!schema_.arguments()[i].is_out())
        for_each_tensor(argument(i), [&](const at::Tensor& t) {
          if (t.dim() > 0) types.insert(t.scalar_type());
        });
    if (types.size() != 1 || !at::isReducedFloatingType(*types.begin())) return {};
    std::vector<std::pair<size_t, at::ScalarType>> scalars;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      if (!argument(i).isTensor() || writes(schema_, i)) continue;
      const at::Tensor& t = argument(i).toTensor();
      if (t.defined() && t.is_cuda() && t.dim() == 0 && !t.is_complex())
        scalars.emplace_back(i, *types.begin());
    }
    return scalars;
  }

  Stack arguments_with(StandIns& stand_ins) const {
    Stack result;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) result.push_back(stand_ins.stand_in(argument(i)));
    return result;
  }

  // Results with their shapes, on the meta device; nothing if only computing them tells.
  std::optional<Stack> shapes_of_results(StandIns& shapes) {
    Stack arguments = arguments_with(shapes);
    if (const ShapeRule* rule = shape_rule(schema_.name())) return (*rule)(arguments);
    if (!returns_only_tensors(schema_)) return std::nullopt;
    if (op_.hasComputedKernelForDispatchKey(DispatchKey::Meta)) {
      try {
        op_.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &arguments);
        return arguments;
      } catch (const c10::NotImplementedError&) {
        arguments = arguments_with(shapes);
      }
    }
    // An operation that only changes its arguments needs no shapes, unless it resizes them.
    if (!returns_only_its_arguments(schema_) ||
        std::ranges::any_of(schema_.arguments(), [](const c10::Argument& a) { return a.is_out(); }))
      return std::nullopt;
    Stack results;
    for (size_t i = 0; i < arguments.size() && results.size() < schema_.returns().size(); ++i)
      if (writes(schema_, i)) results.push_back(arguments[i]);
    return results;
  }

  // The meta kernel has resized its outputs as a CUDA kernel would.
  void resize_outputs(const StandIns& shapes) const {
    for (const auto& [cuda, other] : shapes.pairs()) {
      if (cuda.sizes() == other.sizes() && cuda.strides() == other.strides()) continue;
      at::native::resize_output(cuda, other.sizes());
      if (cuda.strides() != other.strides())
        cuda.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides());
    }
  }

  // Arguments that are changed, as in an addition in place, are read and written.
  std::vector<at::Tensor> cuda_arguments(bool written) const {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const bool is_changed =
          writes(schema_, i) && !schema_.arguments()[i].is_out() && !ignores_old_values(schema_.name());
      if (writes(schema_, i) != written && !is_changed) continue;
      for_each_tensor(argument(i), [&](const at::Tensor& t) {
        if (t.is_cuda()) result.push_back(t);
      });
    }
    return result;
  }

  void queue(const std::vector<at::Tensor>& fresh) const {
    StandIns memory(StandIns::Kind::cpu);
    const Stack arguments = arguments_with(memory);
    std::vector<at::Tensor> written = cuda_arguments(true);
    std::vector<at::Tensor> targets;
    for (const at::Tensor& t : fresh) {
      targets.push_back(memory.stand_in(t));
      if (t.defined()) written.push_back(t);
    }
    // Numbers that weren't computed needn't be as asserted.
    const bool is_skipped = !computes() && schema_.name() == "aten::_assert_async";
    run_on_device(schema_.name(), cuda_arguments(false), written,
                  [is_skipped, op = op_, arguments, targets, scalars = rounded_scalars()] {
                    if (is_skipped) return;
                    Stack stack = arguments;
                    for (const auto& [place, type] : scalars) stack[place] = stack[place].toTensor().to(type);
                    compute(op, std::move(stack), targets);
                  });
  }

  // On the scheduler's thread.
  static void compute(const c10::OperatorHandle& op, Stack stack, const std::vector<at::Tensor>& targets) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    try {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
      size_t i = 0;
      const auto store = [&](const at::Tensor& result) {
        if (i < targets.size() && targets[i].defined() && result.numel() > 0) targets[i].copy_(result);
        ++i;
      };
      for (const IValue& value : stack) {
        if (value.isTensor())
          store(value.toTensor());
        else if (value.isTensorList())
          for (const at::Tensor& t : value.toTensorVector()) store(t);
        else
          ++i;
      }
    } catch (const c10::Error& error) {
      // A kernel that fails leaves a real device unusable.
      end_program("virtual GPU: %s failed on the device: %s\n", op.schema().name().c_str(),
                  error.what_without_backtrace());
    }
  }

  // The host has to know the results, so it waits for the stream, as CUDA's kernels do in this case.
  void run_at_once() {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    if (is_capturing(stream))
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));  // ends the capture with an error
    if (trace_synchronous())
      std::fprintf(stderr, "virtual GPU: waits for results of %s.%s\n", schema_.name().c_str(),
                   schema_.overload_name().c_str());
    wait_for(stream, schema_.name());
    StandIns memory(StandIns::Kind::cpu);
    Stack values = arguments_with(memory);
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &values);
    }
    resize_outputs_and_copy(memory);
    const Results results = results_for(values, memory, device_);
    std::vector<at::Tensor> computed;
    for (const IValue& value : values) {
      const size_t before = computed.size();
      for_each_tensor(value, [&](const at::Tensor& t) { computed.push_back(t); });
      if (computed.size() == before) computed.emplace_back();
    }
    std::vector<at::Tensor> written = cuda_arguments(true);
    for (const at::Tensor& t : results.fresh)
      if (t.defined()) written.push_back(t);
    for (size_t i = 0; i < results.fresh.size(); ++i) {
      if (!results.fresh[i].defined() || results.fresh[i].numel() == 0) continue;
      StandIns target(StandIns::Kind::cpu);
      const at::Tensor to = target.stand_in(results.fresh[i]);
      run_on_device(schema_.name(), {}, {results.fresh[i]}, [to, from = computed[i]] { to.copy_(from); });
    }
    run_on_device(schema_.name(), cuda_arguments(false), written, [] {});
    replace_arguments(results.values);
  }

  void resize_outputs_and_copy(const StandIns& memory) const {
    for (const auto& [cuda, other] : memory.pairs()) {
      if (cuda.sizes() == other.sizes() && other.storage().data() == cuda.storage().data()) continue;
      resize_outputs(memory);
      if (other.numel() == 0) continue;
      StandIns target(StandIns::Kind::cpu);  // queued, because the new memory is poisoned on the stream
      run_on_device(schema_.name(), {}, {cuda},
                    [to = target.stand_in(cuda), from = other] { to.copy_(from); });
    }
  }

  void replace_arguments(const Stack& values) {
    stack_.resize(base_);
    for (const IValue& value : values) stack_.push_back(value);
  }

  static bool trace_synchronous() {
    static const bool traces = std::getenv("VIRTUAL_GPU_TRACE") != nullptr;
    return traces;
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  size_t base_ = 0;
  c10::Device device_ = at::kCUDA;
};

void kernel(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const OwnWork own;
  Call(op, stack).run();
}

// Copies between the host and a device, or between devices, or of equal layouts, are LibTorch's own: one cudaMemcpyAsync.
void copy_kernel(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const size_t base = stack->size() - 3;
  at::Tensor self = (*stack)[base].toTensor();
  const at::Tensor source = (*stack)[base + 1].toTensor();
  const bool is_one_device = self.is_cuda() && source.is_cuda() && self.device() == source.device();
  if (is_one_device && !titan::plan::is_one_memcpy(self, source)) return kernel(op, keys, stack);
  const bool non_blocking = (*stack)[base + 2].toBool();
  at::native::copy_(self, source, non_blocking);
  stack->resize(base);
  stack->emplace_back(self);
}

// LibTorch's own kernels for these touch no device memory, or do so through CUDA's functions only.
const std::set<std::string>& kept() {
  static const std::set<std::string> names = {"aten::empty",
                                              "aten::empty_strided",
                                              "aten::as_strided",
                                              "aten::view",
                                              "aten::_reshape_alias",
                                              "aten::set_",
                                              "aten::resize_",
                                              "aten::_local_scalar_dense",
                                              "aten::is_pinned",
                                              "aten::_pin_memory",
                                              "aten::record_stream",
                                              "aten::is_set_to",
                                              "aten::_fused_sdp_choice",
                                              "aten::_has_same_storage_numel",
                                              "aten::set_data",
                                              "aten::_scaled_mm"};
  return names;
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(
      schema.returns(), [](const c10::Argument& r) { return r.alias_info() && !r.alias_info()->isWrite(); });
}

// With VIRTUAL_GPU_LIBTORCH: LibTorch's functions, which others replace in the other modes.
std::unordered_map<c10::OperatorName, c10::SafeKernelFunction>& own_functions() {
  static auto* functions = new std::unordered_map<c10::OperatorName, c10::SafeKernelFunction>;
  return *functions;
}
void call_own_function(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const bool has_dtype = op.schema().overload_name().starts_with("dtype");  // as attention.cpp names them
  const InOperation in(op.schema().name() + (has_dtype ? ".dtype" : ""));
  own_functions().at(op.operator_name()).callBoxed(op, keys, stack);
}

// LibTorch's own kernels of operations that only CUDA has would launch CUDA kernels.
void refuse(const c10::OperatorHandle& op, DispatchKeySet, Stack*) {
  not_supported("the operation " + op.schema().name() + "." + op.schema().overload_name(),
                "Write it in tests/virtual_gpu/kernels, as attention.cpp does.");
}

// Memory that the allocator hands out isn't written yet, and memory that it takes back may not be read: both are filled with NaN on the
// stream that owns the memory. In every floating-point type, all bits set is a NaN.
void poison(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  const OwnWork own;
  using Action = c10::CachingDeviceAllocator::TraceEntry::Action;
  const bool is_allocated = entry.action_ == Action::ALLOC;
  if (!is_allocated && entry.action_ != Action::FREE_COMPLETED) return;
  // The default stream is the device's; a thread that frees may be on another device.
  const c10::cuda::CUDAGuard on_its_device(entry.device_);
  const auto stream = reinterpret_cast<cudaStream_t>(entry.stream_);
  // Memory of a graph's results stays the graph's, and only its launches use it.
  static std::mutex mutex;
  static auto* const pools_of_graphs = new std::set<c10::MempoolId_t>;
  if (entry.mempool_ != c10::MempoolId_t{0, 0}) {
    const bool is_captured = is_capturing(stream);
    const std::lock_guard lock(mutex);
    if (is_captured) pools_of_graphs->insert(entry.mempool_);
    if (!is_allocated && !is_captured && pools_of_graphs->contains(entry.mempool_)) return;
  }
  auto* address = reinterpret_cast<void*>(entry.addr_);
  const size_t bytes = entry.size_;
  const size_t poisoned_bytes = std::min(bytes, size_t{256} << 20);  // more would take the host's memory
  Operation operation = computation(is_allocated ? "allocation" : "free", {{address, bytes, true}}, [=] {
    note_part(address, bytes, is_allocated);
    if (poisons()) std::memset(address, 0xff, poisoned_bytes);
  });
  operation.is_bookkeeping = true;
  submit(stream, std::move(operation));
}

// Registered when the library is opened, after LibTorch's own: the newest registration wins. Never undone, because the
// dispatcher may be destroyed first.
struct Install {
  std::vector<c10::RegistrationHandleRAII> handles;

  Install() {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (!name.name.starts_with("aten::")) continue;
      const auto op = dispatcher.findSchema(name);
      if (!op || !op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
      if (kept().contains(name.name) || returns_a_view(op->schema())) continue;
      if (runs_libtorch()) {
        install_own(name);
        continue;
      }
      install(name, op->hasComputedKernelForDispatchKey(DispatchKey::CPU)
                        ? c10::KernelFunction::makeFromBoxedFunction<&kernel>()
                        : c10::KernelFunction::makeFromBoxedFunction<&refuse>());
    }
    if (runs_libtorch()) {
      install_own({"aten::copy_", ""});
    } else {
      install({"aten::copy_", ""}, c10::KernelFunction::makeFromBoxedFunction<&copy_kernel>());
      install_random_kernels();
    }
    install_cuda_only_kernels();
    if (checks_races()) watch_host_accesses();
    if (needs_modules()) watch_modules();
  }

  void install_own(const c10::OperatorName& name) {
    const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    own_functions().emplace(name, op.getComputedKernelForDispatchKey(DispatchKey::CUDA));
    install(name, c10::KernelFunction::makeFromBoxedFunction<&call_own_function>());
  }
  void install(const c10::OperatorName& name, c10::KernelFunction function) {
    handles.push_back(c10::Dispatcher::singleton().registerImpl(name, DispatchKey::CUDA, std::move(function),
                                                                std::nullopt, nullptr, "virtual_gpu"));
  }
};
[[maybe_unused]] const Install* const install = new Install;

}  // namespace

/// Called at the first allocation: LibTorch's allocator has its devices then.
extern "C" void virtual_gpu_watch_allocator() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(poison);
}

}  // namespace virtual_gpu
