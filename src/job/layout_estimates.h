#pragma once

// The time and memory of layouts, estimated from plans of few layers: the first round of a search ([Note: search for a layout]).

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "job/job_config.h"
#include "job/plan_search.h"

namespace titan::train {

/// The layers that embedding and output count for each: one, unless the layers divide without that.
int64_t layers_of_an_end(int64_t layers, int64_t stages);
/// With the ends counted so.
bool divides_evenly(int64_t layers, int64_t stages);

/// A layout of all that a block's time depends on. `replicate` is 0 for a pipeline's, which are planned on the ranks of one replica.
Layout block_kind(Layout layout);

/// The numbers of layers with which blocks are planned. Of both, recomputation of every n-th layer selects an n-th.
struct BlockLayers {
  int64_t few = 3, more = 5;
};
BlockLayers block_layers(const Layout& kind, const JobConfig& base);

/// The plans that show what a kind of block takes, on `world` ranks.
std::vector<PlanRequest> block_requests(const Layout& kind, const BlockLayers& layers, int world);

/// The time and memory that a kind of block takes.
struct BlockCosts {
  /// An amount that grows with the layers.
  struct Amount {
    double of_layer = 0, rest = 0;

    double of(double layers) const { return layers * of_layer + rest; }
    Amount operator-(const Amount& other) const { return {of_layer - other.of_layer, rest - other.rest}; }
  };

  Amount seconds{};       ///< a micro-batch's
  Amount once{};          ///< seconds of a step, whatever its micro-batches
  Amount computing{};     ///< seconds of a micro-batch, without any waiting
  Amount bytes{};         ///< a step's
  Amount bytes_of_one{};  ///< a step's with one micro-batch, whose gradients are reduced at once
  Amount parameters{};
  std::string error;        ///< if it can't be planned
  bool has_failed = false;  ///< as a PlanAnswer's
};

/// The memory of a parameter.
struct ParameterBytes {
  double state = 0;           ///< a shard's: itself, its gradient and the optimizer's state
  double gathered = 0;        ///< where it is whole
  double whole_gradient = 0;  ///< before its reduction
};
ParameterBytes parameter_bytes(const JobConfig& config);

/// From the answers to block_requests().
BlockCosts block_costs(const Layout& kind, const BlockLayers& layers, const std::vector<PlanAnswer>& answers,
                       const ParameterBytes& bytes);

struct LayoutEstimate {
  double step_s = 0;
  double bytes = 0;  ///< without what delayed weight gradients are computed from
  /// The largest number of a rank's tokens that wait for weight gradients, times the layers that they wait for: what keeps inputs and gradients
  /// of outputs, also where activations are recomputed.
  double delayed_tokens = 0;
};

class LayoutEstimator {
 public:
  /// Both outlive it.
  LayoutEstimator(const JobConfig& base, const SearchOptions& options);

  std::vector<PlanRequest> block_requests(const Layout& kind) const {
    return train::block_requests(kind, block_layers(kind, base_), options_.world);
  }
  BlockCosts costs_of(const Layout& kind, const std::vector<PlanAnswer>& answers) const {
    return block_costs(kind, block_layers(kind, base_), answers, bytes_);
  }
  LayoutEstimate of(const Layout& layout, const BlockCosts& block);

  /// A replica's, in a step.
  int64_t micro_batches(const Layout& layout) const;

  /// The memory that replicas of parameters, if their number isn't given, and parameters that stay gathered take in addition to sharded ones.
  double bytes_of_copies(const Layout& layout, const BlockCosts& block) const;

 private:
  /// A schedule's time in units of a stage's forward and backward, and the largest numbers of a rank's forwards that wait for their backward, and
  /// of weight gradients that wait for their computation.
  struct ScheduleFigures {
    double time = 0, live = 0, delayed = 0;
  };

  ScheduleFigures schedule_figures(const Layout& layout);
  bool has_one_micro_batch(const Layout& layout) const {
    return layout.pipeline == 1 && micro_batches(layout) == 1;
  }

  const JobConfig& base_;
  const SearchOptions& options_;
  int64_t layers_;
  int64_t sequence_;
  ParameterBytes bytes_;
  std::map<std::tuple<std::string, int, int, int, bool>, ScheduleFigures> figures_;
};

}  // namespace titan::train
