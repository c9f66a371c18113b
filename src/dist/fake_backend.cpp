// A process group without communication: every rank is assumed to hold the same data as this one.

#include "dist/backends.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/trace_range.h"

namespace titan::dist {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

class DoneWork final : public Work {
 public:
  DoneWork() { finish(); }
};

WorkPtr done() { return c10::make_intrusive<DoneWork>(); }

// Copies that stand for messages have a range of their own in traces, as ranks that communicate don't launch them.
TraceRange range_of_message() {
  return TraceRange([] { return "fake message"; });
}

class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(int rank, int size, bool has_batches) : Backend(rank, size), has_batches_(has_batches) {}

  const std::string getBackendName() const override { return "fake"; }
  void setTimeout(std::chrono::milliseconds) override {}

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    const TraceRange range = range_of_message();
    out.view({getSize(), in.numel()}).copy_(in.reshape({1, in.numel()}).expand({getSize(), in.numel()}));
    return done();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    const TraceRange range = range_of_message();
    out.view(-1).copy_(in.view({getSize(), out.numel()}).select(0, getRank()));
    return done();
  }
  bool supportsCoalescing() const override { return has_batches_; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done(); }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outs.size(); ++i) _allgather_base(outs[i], ins[i], options);
    return done();
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outs.size(); ++i) _reduce_scatter_base(outs[i], ins[i], options);
    return done();
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    const TraceRange range = range_of_message();
    out.view(-1).copy_(in.view(-1));
    return done();
  }
  WorkPtr recv(Tensors& tensors, int, int) override {
    const TraceRange range = range_of_message();
    for (auto& tensor : tensors) tensor.zero_();
    return done();
  }
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override { return done(); }
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override { return done(); }
  WorkPtr send(Tensors&, int, int) override { return done(); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(); }

 private:
  bool has_batches_;
};

}  // namespace

BackendPtr make_fake_group(int rank, int size, bool has_batches) {
  return c10::make_intrusive<FakeBackend>(rank, size, has_batches);
}

}  // namespace titan::dist
