// Compares FSDP with buffers that are registered with NCCL with the plain engine, also under tensor parallelism, in Float8 and in pipelines. On
// virtual GPUs, whose NCCL checks its rules for registered memory, also counts the calls that pass it.

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <dlfcn.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "dist/work_graph.h"
#include "distributed/float8_stack.h"
#include "distributed/llama_case.h"
#include "distributed/pipeline_case.h"
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

/// Calls of NCCL's collectives since the flight recorder's `first` that aren't FSDP's: activations, losses, Float8's scales.
uint64_t calls_of_others(uint64_t first) {
  uint64_t count = 0;
  dist::CallRecord call;
  for (uint64_t number = first; number < testing::world().recorder().num_calls(); ++number) {
    if (!testing::world().recorder().read(number, call)) continue;
    const bool is_fsdps =
        (std::strncmp(call.phase, "fsdp::", 6) == 0 && std::strcmp(call.phase, "fsdp::float8_scales") != 0) ||
        std::strcmp(call.phase, "tp::gradient") == 0;
    if (!is_fsdps && !dist::is_point_to_point(call.op)) count += static_cast<uint64_t>(call.num_tensors);
  }
  return count;
}

/// A model, or this rank's stages of one, and its forward and backward, which return the loss.
struct Trained {
  std::vector<nn::AnyRef> models;
  std::function<at::Tensor()> step;
};

void descend(const nn::AnyRef& model) {
  at::NoGradGuard no_grad;
  for (const Parameter& parameter : parameters(model)) {
    const at::Tensor& shard = parameter.data.local;
    if (shard.grad().defined()) shard.add_(shard.grad().sign(), /*alpha=*/-1e-3);
  }
}

void expect_equal_gradients(const nn::AnyRef& model, const nn::AnyRef& wanted_model) {
  const auto expected = parameters(wanted_model), got = parameters(model);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const at::Tensor &grad = got[i].data.local.grad(), &wanted = expected[i].data.local.grad();
    ASSERT_EQ(grad.defined(), wanted.defined()) << got[i].name;
    if (grad.defined()) EXPECT_TRUE(at::equal(grad, wanted)) << got[i].name;
  }
}

/// Trains the model that `make` makes, with and without registered buffers. Weights change by a step's signs, so that each step gathers.
void expect_equal_steps(const std::function<Trained(bool is_registered)>& make) {
  const bool is_virtual = virtual_function<void>("virtual_gpu_registered_calls");
  const Trained plain = make(false), registered = make(true);
  int64_t allocations = 0;
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE(titan::str("step ", step));
    const auto first = count_calls();
    for (const nn::AnyRef& model : plain.models) forget_gradients(model);
    const at::Tensor wanted_loss = plain.step();
    if (is_virtual) virtual_function<void()>("virtual_gpu_start_counting")();
    const auto before = count_calls();
    const uint64_t first_call = testing::world().recorder().num_calls();
    for (const nn::AnyRef& model : registered.models) forget_gradients(model);
    const at::Tensor loss = registered.step();
    const auto after = count_calls();
    if (is_virtual) {
      const uint64_t others = calls_of_others(first_call);
      EXPECT_EQ(after[0] - before[0], others) << "calls of FSDP without registered memory";
      if (step > 0)  // the first one also connects the groups
        EXPECT_EQ(after[2] - before[2], before[0] - first[0] - others) << "all calls of FSDP";
    }
    EXPECT_EQ(after[1], before[1]) << "calls of which only one buffer is registered";
    int64_t now = 0;
    for (const nn::AnyRef& model : registered.models)
      now += fsdp_stats(model).communication_buffer_allocations;
    if (step >= 2) {
      EXPECT_EQ(now, allocations);
      if (is_virtual)
        EXPECT_EQ(virtual_function<uint64_t(const char*, const char*, const char*)>("virtual_gpu_count")(
                      "calls", nullptr, nullptr),
                  0)
            << "allocations of the device's memory, and registrations";
    }
    allocations = now;
    EXPECT_TRUE(at::equal(loss, wanted_loss)) << loss << " " << wanted_loss;
    for (size_t i = 0; i < plain.models.size(); ++i)
      expect_equal_gradients(registered.models[i], plain.models[i]);
    for (const Trained* trained : {&plain, &registered})
      for (const nn::AnyRef& model : trained->models) descend(model);
  }
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
    expect_equal_steps([&](bool is_registered) -> Trained {
      Toy toy = sharded_toy(options, at::kFloat,
                            {.mesh = mesh_of(c.layout),
                             .param_dtype = c.param,
                             .reduce_dtype = c.reduce,
                             .reshard_after_forward = c.policy,
                             .register_buffers = is_registered});
      return {{toy}, [toy, rows]() mutable {
                run_micro_batches(toy, rows, 2);
                return loss_of(toy(rows));
              }};
    });
  }
}

// The ranks' parts of the vocabulary differ in length, so what comes after them in a buffer is at different offsets: the gradients
// of norms, which tensor-parallel ranks sum, must not.
TEST(FsdpRegistered, EqualsThePlainEngineUnderTensorParallelism) {
  if (!has_nccl() || testing::world().size() % 2 != 0)
    GTEST_SKIP() << "needs NCCL and an even number of ranks";
  LlamaCase llama = mini_llama();
  llama.args["vocab_size"] = int64_t{251};
  llama.rows = 4;
  llama.seq_len = 16;
  const Batch batch = random_batch(llama, 5);
  struct Spread {
    train::ParallelDims dims;
    TensorParallelOptions tensor = {};
    at::ScalarType reduce = at::kFloat;
  };
  const bool fours = testing::world().size() == 4;
  const int replicas = fours ? 2 : 1;
  std::vector<Spread> all{
      {.dims = {.dp_shard = replicas, .tp = 2}},
      {.dims = {.dp_shard = replicas, .tp = 2}, .tensor = {.overlap = true}, .reduce = at::kBFloat16}};
  if (fours) all.push_back({.dims = {.dp_replicate = 2, .tp = 2}, .reduce = at::kBFloat16});
  for (const Spread& spread : all) {
    SCOPED_TRACE(titan::str("replicate ", spread.dims.dp_replicate, ", shard ", spread.dims.dp_shard,
                            spread.tensor.overlap ? ", overlapped" : "", ", reduce ", spread.reduce));
    expect_equal_steps([&](bool is_registered) -> Trained {
      const train::Meshes meshes = train::build_meshes(testing::world(), spread.dims);
      const std::shared_ptr<train::TrainableModel> model = build_llama(llama, at::kFloat);
      llama_spec().parallelize(*model, {.meshes = meshes,
                                        .fsdp = {.mesh = meshes.fsdp,
                                                 .param_dtype = at::kBFloat16,
                                                 .reduce_dtype = spread.reduce,
                                                 .register_buffers = is_registered},
                                        .tensor = spread.tensor});
      materialize(model->root(), 3);
      return {{model->root()}, [model, mine = batch.rows(meshes.dp_rank(), meshes.dp_degree())] {
                const at::Tensor loss = loss_of(*model, mine, 50);
                loss.backward();
                return loss.detach();
              }};
    });
  }
}

TEST(FsdpRegistered, EqualsThePlainEngineInFloat8) {
  if (!has_nccl() || testing::world().size() % 2 != 0)
    GTEST_SKIP() << "needs NCCL and an even number of ranks";
  const int size = testing::world().size();
  std::vector<stack::Case> all;
  const auto add = [&](const std::string& recipe, const stack::StackLayout& layout,
                       const float8::GatherOptions& gather, const ReshardAfterForward& policy = {}) {
    all.push_back({.recipe = recipe,
                   .layout = layout,
                   .gather = gather,
                   .fsdp = {.param_dtype = at::kBFloat16, .reshard_after_forward = policy},
                   .mixed = true});
  };
  add("tensorwise", {.shard = size}, {.in_float8 = true});
  add("tensorwise", {.shard = size / 2, .tp = 2, .plan = stack::sequence_plan()}, {.in_float8 = true});
  if (size == 4) {
    add("rowwise", {.shard = size}, {});
    add("tensorwise", {.shard = size}, {.in_float8 = true, .scales_at_once = true},
        ReshardAfterForward::to_size(2));
    add("rowwise", {.shard = 2, .tp = 2, .plan = stack::sequence_plan()}, {});
    add("tensorwise", {.replicate = 2, .tp = 2, .plan = stack::sequence_plan()}, {.in_float8 = true});
  }
  for (stack::Case& c : all) {
    SCOPED_TRACE(stack::name_of(c));
    expect_equal_steps([&](bool is_registered) -> Trained {
      c.fsdp.register_buffers = is_registered;
      const stack::Stack model = stack::make(c).model;
      const auto part = static_cast<size_t>(testing::world().rank() / c.layout.tp);
      return {{model},
              [model,
               x = stack::global_batch().chunk(c.layout.replicate * c.layout.shard)[part].to(at::kBFloat16)] {
                const at::Tensor loss = stack::loss_of(model, x);
                loss.backward();
                return loss.detach();
              }};
    });
  }
}

// The stages' activations, which are sent, aren't registered.
void expect_equal_pipelines(const Variant& variant) {
  SCOPED_TRACE(variant.schedule);
  LlamaCase llama = mini_llama();
  llama.args["n_layers"] = int64_t{4};
  const Batch batch = random_batch(llama, 5);
  expect_equal_steps([&](bool is_registered) -> Trained {
    const train::Meshes meshes = train::build_meshes(testing::world(), variant.dims);
    const auto stages = std::make_shared<Stages>(llama, kBfloat16, variant, meshes,
                                                 StageOptions{.register_buffers = is_registered});
    const auto runner =
        std::make_shared<train::PipelineRunner>(stages->stages(), meshes.pp, testing::device());
    const auto mine =
        micro_batches_of(batch.rows(meshes.dp_rank(), meshes.dp_degree()), variant.micro_batches);
    const train::StepPlan plan = runner->plan(
        stages->schedule(), boundaries_of(llama, kBfloat16, variant, mine.front().input_BS.size(0)));
    std::vector<nn::AnyRef> models;
    for (const auto& stage : stages->stages()) models.push_back(stage.model->root());
    return {models, [stages, runner, mine, plan, count = batch.num_valid()] {
              return runner->run(plan, mine, count);
            }};
  });
}

TEST(FsdpRegistered, EqualsThePlainEngineInPipelines) {
  if (!has_nccl() || testing::world().size() != 4) GTEST_SKIP() << "needs NCCL and four ranks";
  const train::ParallelDims dims{.dp_shard = 2, .pp = 2};
  expect_equal_pipelines({.dims = dims, .schedule = "1F1B", .stages = 2, .micro_batches = 4});
  expect_equal_pipelines({.dims = dims, .schedule = "Interleaved1F1B", .stages = 4, .micro_batches = 4});
  expect_equal_pipelines({.dims = dims, .schedule = "ZBVZeroBubble", .stages = 4, .micro_batches = 4});
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
