// Compares FSDP with buffers that are registered with NCCL with the plain engine. On virtual GPUs, whose NCCL checks its rules for
// registered memory, also counts the calls that pass it.

#include <array>
#include <optional>
#include <string>
#include <vector>

#include <dlfcn.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "dist/work_graph.h"
#include "distributed/toy_case.h"
#include "parallel/fsdp/comm_context.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"

namespace titan {
namespace {

using namespace testing;  // NOLINT: the test's own names

bool has_nccl() { return testing::world().backend() == "nccl"; }

/// Null on other GPUs.
template <class Function>
Function* virtual_function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

/// Calls of NCCL's collectives with 0, 1 and 2 buffers in registered memory.
std::array<uint64_t, 3> count_calls() {
  std::array<uint64_t, 3> counts{};
  const auto count = virtual_function<uint64_t(const char*, int)>("virtual_gpu_registered_calls");
  for (const char* name : {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce"})
    for (size_t i = 0; count && i < counts.size(); ++i) counts[i] += count(name, static_cast<int>(i));
  return counts;
}

struct Case {
  DataLayout layout;
  std::optional<at::ScalarType> param, reduce;
  ReshardAfterForward policy;
};

std::vector<Case> cases() {
  const int size = testing::world().size();
  std::vector<Case> cases;
  for (const DataLayout& layout : layouts(size)) {
    cases.push_back({layout, {}, {}, {}});
    cases.push_back({layout, at::kBFloat16, at::kFloat, {}});
    cases.push_back({layout, at::kBFloat16, at::kBFloat16, {}});
    if (layout.shard == 4) cases.push_back({layout, at::kBFloat16, {}, ReshardAfterForward::to_size(2)});
  }
  return cases;
}

std::string name_of(const Case& c) {
  return titan::str("replicate ", c.layout.replicate, ", shard ", c.layout.shard, ", param ",
                    c.param.value_or(at::kFloat), ", reduce ", c.reduce.value_or(at::kFloat), ", policy ",
                    static_cast<int>(c.policy.kind));
}

TEST(FsdpRegistered, EqualsThePlainEngineAndPassesOnlyRegisteredMemory) {
  if (!has_nccl()) GTEST_SKIP() << "needs NCCL";
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options{.freeze_first = true, .extra_unused = true};
  const at::Tensor rows = my_rows(input_rows(12, options.dim, at::kFloat), rank, size);
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    FsdpOptions fsdp{.mesh = mesh_of(c.layout),
                     .param_dtype = c.param,
                     .reduce_dtype = c.reduce,
                     .reshard_after_forward = c.policy};
    Toy plain = sharded_toy(options, at::kFloat, fsdp);
    fsdp.register_buffers = true;
    Toy registered = sharded_toy(options, at::kFloat, fsdp);
    int64_t allocations = 0;
    for (int step = 0; step < 4; ++step) {
      forget_gradients(plain);
      run_micro_batches(plain, rows, 2);
      const auto before = count_calls();
      forget_gradients(registered);
      run_micro_batches(registered, rows, 2);
      const auto after = count_calls();
      EXPECT_EQ(after[0], before[0]) << "calls without registered memory";
      EXPECT_EQ(after[1], before[1]) << "calls of which only one buffer is registered";
      if (virtual_function<void>("virtual_gpu_registered_calls") && size > 1) EXPECT_GT(after[2], before[2]);
      const auto expected = parameters(plain), got = parameters(registered);
      for (size_t i = 0; i < got.size(); ++i) {
        const at::Tensor &grad = got[i].data.local.grad(), &wanted = expected[i].data.local.grad();
        ASSERT_EQ(grad.defined(), wanted.defined()) << got[i].name;
        if (grad.defined()) EXPECT_TRUE(at::equal(grad, wanted)) << got[i].name << " in step " << step;
      }
      EXPECT_TRUE(at::equal(loss_of(registered(rows)), loss_of(plain(rows)))) << "step " << step;
      const int64_t now = fsdp_stats(registered).communication_buffer_allocations;
      if (step >= 2) EXPECT_EQ(now, allocations) << "step " << step;
      allocations = now;
    }
  }
}

// Pieces of one segment would be at offsets that depend on a rank's earlier requests.
TEST(FsdpRegistered, EachBufferIsAnAllocationOfItsOwn) {
  if (!has_nccl() || testing::world().size() == 1) GTEST_SKIP() << "needs NCCL and two ranks";
  auto& backend = *dist::device_backend();
  const auto reserved = [&] { return backend.memory(testing::device().index()).reserved_bytes; };
  fsdp::BufferPool pool(testing::device());
  testing::world().everyone()->add_to(pool.use_registered());
  const dist::Stream current = dist::Stream::current(testing::device());
  constexpr int64_t kMebi = 1 << 20;
  std::vector<at::Tensor> buffers;
  for (const auto& [bytes, taken] :
       std::vector<std::array<int64_t, 2>>{{1, 2 * kMebi}, {3 * kMebi, 20 * kMebi}, {11 * kMebi, 12 * kMebi}})
    for (int i = 0; i < 2; ++i) {
      const int64_t before = reserved();
      buffers.push_back(pool.acquire(bytes, at::kByte, current));
      EXPECT_EQ(reserved() - before, taken) << bytes;
    }
}

TEST(FsdpRegistered, NothingIsAllocatedWhileWorkIsRecorded) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "needs a GPU";
  fsdp::BufferPool pool(testing::device());
  pool.use_registered();
  const dist::Stream side = dist::Stream::create(testing::device());
  const dist::StreamGuard on_side(side);
  dist::WorkGraph graph(testing::device());
  const std::string error = error_of([&] { graph.record([&] { pool.acquire(1, at::kByte, side); }); });
  EXPECT_NE(error.find("can't be allocated while work is recorded"), std::string::npos) << error;
}

// The virtual NCCL ends a program that frees registered memory.
TEST(FsdpRegistered, AllMemoryIsDeregisteredAndFreedWithTheModel) {
  if (!has_nccl() || testing::world().size() == 1) GTEST_SKIP() << "needs NCCL and two ranks";
  const auto num_registered = virtual_function<int()>("virtual_gpu_num_registrations");
  // A request that fails makes the allocator give back what is free.
  const auto reserved = [] {
    auto& backend = *dist::device_backend();
    const int device = testing::device().index();
    EXPECT_THROW(at::empty({2 * backend.memory(device).total_bytes}, options_of(at::kByte)),
                 c10::OutOfMemoryError);
    return backend.memory(device).reserved_bytes;
  };
  const ToyOptions options;
  const at::Tensor rows =
      my_rows(input_rows(12, options.dim, at::kFloat), testing::world().rank(), testing::world().size());
  const auto train = [&] {
    Toy model = sharded_toy(options, at::kFloat,
                            {.mesh = mesh_of({1, testing::world().size()}), .register_buffers = true});
    run_micro_batches(model, rows, 1);
    if (num_registered) EXPECT_GT(num_registered(), 0);
  };
  train();  // makes the communicators
  const int64_t before = reserved();
  for (int i = 0; i < 2; ++i) train();
  EXPECT_EQ(reserved(), before);
  if (num_registered) EXPECT_EQ(num_registered(), 0);
}

TEST(FsdpRegistered, IsRefusedWithoutNcclAndWithOffloading) {
  const ToyOptions options;
  const int size = testing::world().size();
  FsdpOptions fsdp{.mesh = mesh_of({1, size}), .register_buffers = true};
  if (!has_nccl() && size > 1) {
    Toy model = sharded_toy(options, at::kFloat, fsdp);
    const std::string error = error_of([&] { model(input_rows(2, options.dim, at::kFloat)); });
    EXPECT_NE(error.find(testing::device().is_cpu() ? "register_buffers needs GPUs and NCCL"
                                                    : "only NCCL registers memory"),
              std::string::npos)
        << error;
  }
  fsdp.cpu_offload = true;
  if (testing::device().is_cuda())
    EXPECT_NE(error_of([&] { sharded_toy(options, at::kFloat, fsdp); }).find("cpu_offload"),
              std::string::npos);
}

}  // namespace
}  // namespace titan
