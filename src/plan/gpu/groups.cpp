#include "plan/gpu/groups.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dist/backends.h"
#include "plan/gpu/planned_gpu.h"
#include "plan/gpu/ranges.h"

namespace titan::plan {

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

/// Whoever waits for it makes the current stream wait for the calls.
class PlannedWork final : public Work {
 public:
  explicit PlannedWork(int batch) : batch_(batch) { finish(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    PlannedGpu::get().trace().synchronized({Sync::Kind::WaitCall, current_stream(), batch_});
  }

 private:
  int batch_;
};

uintptr_t address_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? reinterpret_cast<uintptr_t>(tensor.storage().data()) : 0;
}

class PlannedGroup final : public c10d::Backend {
 public:
  explicit PlannedGroup(const dist::GroupSpec& spec)
      : Backend(spec.rank, spec.size),
        name_(spec.name),
        world_ranks_(spec.world_ranks),
        communicator_(PlannedGpu::get().trace().add_communicator(spec.world_ranks)),
        has_batches_(!PlannedGpu::get().device().is_cpu),  // gloo has none
        hosts_(dist::make_fake_group(spec.rank, spec.size, has_batches_)) {}

  const std::string getBackendName() const override { return "fake"; }
  void setTimeout(std::chrono::milliseconds) override {}

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return out.is_cuda() ? count("all_gather", out, in) : hosts_->_allgather_base(out, in, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return out.is_cuda() ? count("reduce_scatter", out, in) : hosts_->_reduce_scatter_base(out, in, options);
  }
  bool supportsCoalescing() const override { return has_batches_; }
  // The sends of a batch to one rank are one call, and so are what is received from it.
  void startCoalescing() override { batch_.emplace(); }
  WorkPtr endCoalescing() override {
    const int batch = PlannedGpu::get().trace().called(std::move(*batch_));
    batch_.reset();
    return c10::make_intrusive<PlannedWork>(batch);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& options) override {
    return outs[0].is_cuda() ? count("all_gather", outs, ins)
                             : hosts_->allgather_into_tensor_coalesced(outs, ins, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options) override {
    return outs[0].is_cuda() ? count("reduce_scatter", outs, ins)
                             : hosts_->reduce_scatter_tensor_coalesced(outs, ins, options);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    return out.is_cuda() ? count("all_to_all", out, in)
                         : hosts_->alltoall_base(out, in, out_splits, in_splits, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return tensors[0].is_cuda() ? count("all_reduce", tensors[0], tensors[0])
                                : hosts_->allreduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return tensors[0].is_cuda() ? count("broadcast", tensors[0], tensors[0])
                                : hosts_->broadcast(tensors, options);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return tensors[0].is_cuda() ? count("send", tensors[0], tensors[0], peer)
                                : hosts_->send(tensors, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return tensors[0].is_cuda() ? count("receive", tensors[0], tensors[0], peer)
                                : hosts_->recv(tensors, peer, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return hosts_->barrier(options); }

 private:
  WorkPtr count(const char* op, const at::Tensor& out, const at::Tensor& in, int peer = -1) {
    return count(op, at::ArrayRef<at::Tensor>(out), at::ArrayRef<at::Tensor>(in), peer);
  }
  WorkPtr count(const char* op, at::ArrayRef<at::Tensor> outs, at::ArrayRef<at::Tensor> ins, int peer = -1) {
    const std::string call = current_call();
    Trace& trace = PlannedGpu::get().trace();
    Collective counted{.op = trace.number_of(op),
                       .group = trace.number_of(name_),
                       .communicator = communicator_,
                       .group_size = getSize(),
                       .label = trace.number_of(call.substr(std::min(call.size(), call.find(' ') + 1))),
                       .module = trace.number_of(current_module()),
                       .peer = peer < 0 ? -1 : world_ranks_[static_cast<size_t>(peer)],
                       .stream = current_stream()};
    const bool is_of_fsdp = call.find("fsdp::") != std::string::npos;
    const Category category = !is_of_fsdp                            ? Category::Communication
                              : std::string_view(op) == "all_gather" ? Category::Gathered
                                                                     : Category::Gradients;
    for (size_t i = 0; i < outs.size(); ++i) {
      trace.set_category(address_of(outs[i]), category);
      trace.set_category(address_of(ins[i]), category);
      counted.bytes += static_cast<int64_t>(std::max(outs[i].nbytes(), ins[i].nbytes()));
    }
    counted.num_tensors = static_cast<int>(outs.size());
    if (!batch_) return c10::make_intrusive<PlannedWork>(trace.called({counted}));
    add_to_batch(counted);
    return c10::make_intrusive<PlannedWork>(0);  // that of the batch is waited for
  }

  void add_to_batch(const Collective& counted) {
    for (Collective& call : *batch_)
      if (call.op == counted.op && call.peer == counted.peer) {
        call.bytes += counted.bytes;
        call.num_tensors += counted.num_tensors;
        return;
      }
    batch_->push_back(counted);
  }

  std::string name_;
  std::vector<int> world_ranks_;
  int communicator_;
  std::optional<std::vector<Collective>> batch_;  // the calls since startCoalescing()
  bool has_batches_;
  dist::BackendPtr hosts_;  // for the hosts' tensors, which have values
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_planned_group(const dist::GroupSpec& spec) {
  return c10::make_intrusive<PlannedGroup>(spec);
}

}  // namespace titan::plan
