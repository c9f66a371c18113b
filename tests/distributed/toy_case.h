#pragma once

// The toy network sharded in every layout, compared with the same network on one rank.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/layouts.h"
#include "distributed/toy_model.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "unit/golden.h"

namespace titan::testing {

inline at::Tensor input_rows(int64_t rows, int64_t dim, at::ScalarType dtype) {
  return BlockImpl::values({rows, dim}, options_of(dtype)) * 2;
}

/// The rows of the global batch that this rank computes: r, r + N, ...
inline at::Tensor my_rows(const at::Tensor& batch, int rank, int size) {
  return batch.slice(0, rank, batch.size(0), size).contiguous();
}

inline DeviceMesh mesh_of(const DataLayout& layout) {
  return DeviceMesh::create(world(), {{"dp_replicate", layout.replicate}, {"dp_shard", layout.shard}});
}

inline Toy sharded_toy(const ToyOptions& options, at::ScalarType dtype, const FsdpOptions& fsdp) {
  Toy model(options, dtype);
  for (auto& block : model->blocks) fully_shard(block, fsdp);
  fully_shard(model, fsdp);
  materialize(model, 0);
  return model;
}

/// The loss is a sum, so the gradients of all ranks' rows add up to the whole batch's.
inline at::Tensor loss_of(const at::Tensor& output) { return output.pow(2).sum() / 8; }

template <class Model>
void expect_equal_gradients(const Model& sharded, const Model& reference, double tolerance,
                            const std::string& what) {
  const auto expected = reference->named_parameters();
  for (const Parameter& parameter : parameters(sharded)) {
    const at::Tensor& expected_param = expected[parameter.name];
    if (!expected_param.requires_grad()) {
      EXPECT_FALSE(parameter.data.local.requires_grad()) << what << " " << parameter.name;
      continue;
    }
    DTensor grad = parameter.data;
    // A group that took no part in the step has no gradient on any rank.
    const at::Tensor& local = parameter.data.local.grad();
    grad.local = local.defined() ? local : at::zeros_like(parameter.data.local);
    const at::Tensor whole = full_tensor(grad);
    const at::Tensor wanted =
        expected_param.grad().defined() ? expected_param.grad() : at::zeros_like(expected_param);
    EXPECT_LE(relative_error(whole, wanted), tolerance) << what << " " << parameter.name;
  }
}

inline void forget_gradients(const nn::AnyRef& model) {
  for (const Parameter& parameter : parameters(model)) parameter.data.local.mutable_grad().reset();
}

inline void run_micro_batches(Toy& model, const at::Tensor& rows, int count) {
  for (int m = 0; m < count; ++m) {
    set_last_micro_batch(model, m + 1 == count);
    loss_of(model(my_rows(rows, m, count))).backward();
  }
}

/// Runs three steps of toys with a frozen and an unused parameter, in every layout, with every policy, way to
/// reduce and number of micro-batches. Compares each gradient with one rank's, and checks that nothing stays
/// gathered. `make(options, dtype, fsdp)` makes a sharded toy.
template <class Make>
void expect_one_ranks_gradients(const Make& make, at::ScalarType dtype, double tolerance) {
  using Policy = ReshardAfterForward;
  const int size = world().size(), rank = world().rank();
  const ToyOptions options{.freeze_first = true, .extra_unused = true};
  const at::Tensor batch = input_rows(12, options.dim, dtype);
  Toy reference(options, dtype);
  loss_of(reference(batch)).backward();
  const auto check = [&](const DataLayout& layout, const Policy& policy, bool reduce_every,
                         int micro_batches) {
    Toy model = make(options, dtype,
                     FsdpOptions{.mesh = mesh_of(layout),
                                 .reshard_after_forward = policy,
                                 .reduce_every_micro_batch = reduce_every});
    const std::string what =
        str("replicate ", layout.replicate, " shard ", layout.shard, " policy ",
            static_cast<int>(policy.kind), " reduce_every ", reduce_every, " micro-batches ", micro_batches);
    for (int step = 0; step < 3; ++step) {
      forget_gradients(model);
      run_micro_batches(model, my_rows(batch, rank, size), micro_batches);
      expect_equal_gradients(model, reference, tolerance, what);
    }
    EXPECT_EQ(fsdp_stats(model).gathered_groups, 0) << what;
  };
  for (const DataLayout& layout : layouts(size))
    for (const Policy& policy : {Policy{}, Policy::always(), Policy::never(),
                                 Policy::to_size(size == 4 && layout.shard == 4 ? 2 : 1)})
      for (const bool reduce_every : {true, false})
        for (const int micro_batches : {1, 3}) check(layout, policy, reduce_every, micro_batches);
}

}  // namespace titan::testing
