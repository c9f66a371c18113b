#pragma once

// Registering a parallelism whose ranks share the rows of a batch. It takes one folder and one registration,
// in this library or in a user's shared object. docs/adding_a_parallelism.md walks through one.
//
//   struct SlicesSettings { int64_t degree = 1; };        // with describe(config::Table<SlicesSettings>&)
//   titan::register_parallelism<SlicesSettings>(
//       "slices", {.axis = "slices", .apply = share_rows, .is_applied = shares_rows});
//
// [parallelism.args.slices] then has its settings, and the mesh gets an axis "slices" between dp_shard and
// tp.
//
// [Note: axes that share rows]
// The ranks of such an axis read the same rows. Each computes the loss of its part of the tokens, so losses
// add up over the axis, and a gradient on one rank is a summand: FSDP shards parameters over dp_shard and
// these axes together, and its reduction sums the gradients. Tensor parallelism and pipelines see only this
// rank's part of the rows.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "titan/config/table.h"
#include "titan/core/error.h"
#include "titan/core/registry.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"

namespace titan {

/// An axis of the mesh whose ranks share rows.
struct RowAxis {
  std::string name;             ///< in the mesh: "cp"
  int degree = 1;               ///< number of ranks
  int parts_per_rank = 1;       ///< a row's length is a multiple of degree * parts_per_rank
  std::string degree_key = {};  ///< in [parallelism], for messages: "context_parallel_degree"
  std::string kind = {};        ///< the registered name: "context"
  /// Every job's mesh has this axis, even with one rank. Checkpoints record the axes of the mesh that wrote
  /// them, so the axis of a parallelism added later exists only where it is used.
  bool always_in_mesh = false;
};

/// A registered parallelism with the settings of one job.
struct Parallelism {
  RowAxis axis;
  /// Changes a model, or a pipeline stage of one, so that a call takes whole rows on every rank of the axis
  /// and computes this rank's part. The axis has two ranks or more.
  std::function<void(const nn::AnyRef& root, const DeviceMesh& axis)> apply;
  /// Whether apply() was called on `root` or on a module below it.
  std::function<bool(const nn::AnyRef& root)> is_applied;
};

/// A setting that is invalid or conflicts with another one.
struct SettingProblem {
  std::string key;  ///< in [parallelism]
  std::string what;
};

/// A parallelism to register. Settings is a struct with a member `int64_t degree = 1` and a
/// `describe(config::Table<Settings>&)` beside it, which names the key "degree".
template <class Settings>
struct ParallelismKind {
  std::string axis;  ///< its name in the mesh
  std::function<void(const nn::AnyRef& root, const DeviceMesh& axis, const Settings&)> apply;
  std::function<bool(const nn::AnyRef& root)> is_applied;
  std::function<int(const Settings&)> parts_per_rank = {};                         ///< default: 1
  std::function<std::vector<SettingProblem>(const Settings&)> find_problems = {};  ///< default: none
  /// The prefix of its keys in [parallelism]. Default: "args.<name>.", a separate table.
  std::string key_prefix = {};
  bool always_in_mesh = false;  ///< RowAxis::always_in_mesh
};

/// A registered parallelism with the type of its settings erased. `settings` is a result of make_settings();
/// a const pointer may be null, which means the defaults.
class ParallelismSpec {
 public:
  virtual ~ParallelismSpec() = default;
  /// Whether its settings are [parallelism.args.<name>]; otherwise ParallelismSettings has a member for them.
  virtual bool has_args_table() const = 0;
  virtual std::vector<config::FieldInfo> fields() const = 0;
  virtual std::shared_ptr<void> make_settings() const = 0;
  virtual std::shared_ptr<void> copy_settings(const void* settings) const = 0;
  virtual void set_degree(void* settings, int64_t degree) const = 0;
  virtual std::vector<SettingProblem> find_problems(const void* settings) const = 0;
  virtual Parallelism choose(const void* settings) const = 0;
};

/// [parallelism.args]: settings by the name of their parallelism.
using ParallelismArgs = std::map<std::string, std::shared_ptr<void>>;

Registry<std::shared_ptr<const ParallelismSpec>>& parallelisms();

/// Throws Error if the name is taken, a required member is missing, or the mesh uses the axis's name for
/// another axis.
template <class Settings>
void register_parallelism(const std::string& name, ParallelismKind<Settings> kind);

/// All registered parallelisms with their default settings.
std::vector<Parallelism> default_parallelisms();

/// The axes in a job's mesh: those of two ranks or more, and those with always_in_mesh.
std::vector<RowAxis> row_axes(const std::vector<Parallelism>& chosen);

/// Applies the parallelisms whose axis of `mesh` has two ranks or more. Call it after parallelize() and
/// before checkpoint_activations() and fully_shard().
void apply_parallelisms(const nn::AnyRef& root, const std::vector<Parallelism>& chosen,
                        const DeviceMesh& mesh);

// ---- templates

namespace detail {

void check_parallelism(const std::string& name, const std::string& axis, bool is_complete);

template <class Settings>
class ParallelismOf final : public ParallelismSpec {
 public:
  ParallelismOf(std::string name, ParallelismKind<Settings> kind)
      : name_(std::move(name)), kind_(std::move(kind)), has_args_table_(kind_.key_prefix.empty()) {
    check_parallelism(name_, kind_.axis, kind_.apply && kind_.is_applied);
    if (has_args_table_) kind_.key_prefix = "args." + name_ + ".";
  }

  bool has_args_table() const override { return has_args_table_; }
  std::vector<config::FieldInfo> fields() const override {
    config::Table<Settings> table;
    describe(table);
    return table.fields();
  }
  std::shared_ptr<void> make_settings() const override { return std::make_shared<Settings>(); }
  std::shared_ptr<void> copy_settings(const void* settings) const override {
    return std::make_shared<Settings>(value_of(settings));
  }
  void set_degree(void* settings, int64_t degree) const override {
    static_cast<Settings*>(settings)->degree = degree;
  }
  std::vector<SettingProblem> find_problems(const void* settings) const override {
    return kind_.find_problems ? kind_.find_problems(value_of(settings)) : std::vector<SettingProblem>{};
  }
  Parallelism choose(const void* settings) const override {
    const Settings chosen = value_of(settings);
    return {.axis = {.name = kind_.axis,
                     .degree = static_cast<int>(chosen.degree),
                     .parts_per_rank = kind_.parts_per_rank ? kind_.parts_per_rank(chosen) : 1,
                     .degree_key = kind_.key_prefix + "degree",
                     .kind = name_,
                     .always_in_mesh = kind_.always_in_mesh},
            .apply = [apply = kind_.apply, chosen](const nn::AnyRef& root,
                                                   const DeviceMesh& axis) { apply(root, axis, chosen); },
            .is_applied = kind_.is_applied};
  }

 private:
  static Settings value_of(const void* settings) {
    return settings ? *static_cast<const Settings*>(settings) : Settings{};
  }

  std::string name_;
  ParallelismKind<Settings> kind_;
  bool has_args_table_;
};

}  // namespace detail

template <class Settings>
void register_parallelism(const std::string& name, ParallelismKind<Settings> kind) {
  parallelisms().add(name, std::make_shared<const detail::ParallelismOf<Settings>>(name, std::move(kind)));
}

}  // namespace titan
