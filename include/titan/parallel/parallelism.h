#pragma once

// The door for parallelisms with communication of their own, whose ranks share the rows of a batch: one folder
// and one registration, in this library or in a user's shared object.
//
//   struct HalvesSettings { int64_t degree = 1; };                 // with describe(config::Table<HalvesSettings>&)
//   titan::register_parallelism<HalvesSettings>("halves", {.axis = "halves", .apply = apply_halves,
//                                                          .is_applied = uses_halves});
//
// [parallelism.args.halves] then holds its settings, and the mesh gets an axis "halves" between dp_shard and tp.
//
// [Note: axes that share rows]
// The ranks of such an axis read the same rows. Each computes the loss of its part of the tokens, so losses add
// up over the axis, and a gradient on one rank is a summand: FSDP shards parameters over dp_shard and these axes
// together, and its reduction sums the gradients. Tensor parallelism and pipelines see rows that are cut already.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "titan/config/table.h"
#include "titan/core/registry.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"

namespace titan {

/// An axis of the mesh whose ranks share rows.
struct RowAxis {
  std::string name;             ///< in the mesh: "cp"
  int degree = 1;               ///< ranks
  int parts_per_rank = 1;       ///< the length of a row has to be a multiple of degree * parts_per_rank
  std::string degree_key = {};  ///< of [parallelism], for messages: "context_parallel_degree"
};

/// A registered parallelism with the settings of one job.
struct Parallelism {
  std::string kind;  ///< its name in the registry, as in "context parallelism"
  RowAxis axis;
  /// Changes a model, or a pipeline stage of one, so that its calls take whole rows on every rank of the axis and
  /// compute this rank's part. The axis has two ranks or more.
  std::function<void(const nn::AnyRef& root, const DeviceMesh& axis)> apply;
  /// Whether apply() was called on `root` or on a module below it.
  std::function<bool(const nn::AnyRef& root)> is_applied;
};

/// A setting that another one rules out.
struct SettingProblem {
  std::string key;  ///< of [parallelism]
  std::string what;
};

/// What registers: `axis`, `apply` and `is_applied` are required. Settings is a struct with a member
/// `int64_t degree = 1` and a `describe(config::Table<Settings>&)` beside it.
template <class Settings>
struct ParallelismKind {
  std::string axis;
  std::function<void(const nn::AnyRef& root, const DeviceMesh& axis, const Settings&)> apply;
  std::function<bool(const nn::AnyRef& root)> is_applied;
  std::function<int(const Settings&)> parts_per_rank = {};                         ///< default: 1
  std::function<std::vector<SettingProblem>(const Settings&)> find_problems = {};  ///< default: none
  /// What stands before its keys in [parallelism]; default: "args.<name>.".
  std::string key_prefix = {};
  /// The mesh has this axis in every job, also with one rank. Checkpoints name the axes of the mesh that they were
  /// written on, so an axis that joins later is only there where it is used.
  bool always_in_mesh = false;
};

/// A kind whose settings struct is erased: `settings` below is what make_settings() returned.
class ParallelismSpec {
 public:
  virtual ~ParallelismSpec() = default;
  virtual const std::string& key_prefix() const = 0;
  virtual bool always_in_mesh() const = 0;
  virtual std::vector<config::FieldInfo> fields() const = 0;
  virtual std::shared_ptr<void> make_settings() const = 0;
  virtual void set_degree(void* settings, int64_t degree) const = 0;
  virtual std::vector<SettingProblem> find_problems(const void* settings) const = 0;
  virtual Parallelism choose(const void* settings) const = 0;
};

Registry<std::shared_ptr<const ParallelismSpec>>& parallelisms();

template <class Settings>
void register_parallelism(const std::string& name, ParallelismKind<Settings> kind);

/// All registered parallelisms with their default settings.
std::vector<Parallelism> default_parallelisms();

/// Applies those whose axis of `mesh` has two ranks or more. In a model's plan: after parallelize(), before
/// checkpoint_activations() and fully_shard().
void apply_parallelisms(const nn::AnyRef& root, const std::vector<Parallelism>& chosen, const DeviceMesh& mesh);

namespace detail {

template <class Settings>
class ParallelismOf final : public ParallelismSpec {
 public:
  ParallelismOf(std::string name, ParallelismKind<Settings> kind) : name_(std::move(name)), kind_(std::move(kind)) {
    TITAN_CHECK(!kind_.axis.empty() && kind_.apply && kind_.is_applied, "parallelism '", name_,
                "': a parallelism needs axis, apply and is_applied");
    if (kind_.key_prefix.empty()) kind_.key_prefix = "args." + name_ + ".";
  }

  const std::string& key_prefix() const override { return kind_.key_prefix; }
  bool always_in_mesh() const override { return kind_.always_in_mesh; }
  std::vector<config::FieldInfo> fields() const override {
    config::Table<Settings> table;
    describe(table);
    return table.fields();
  }
  std::shared_ptr<void> make_settings() const override { return std::make_shared<Settings>(); }
  void set_degree(void* settings, int64_t degree) const override {
    static_cast<Settings*>(settings)->degree = degree;
  }
  std::vector<SettingProblem> find_problems(const void* settings) const override {
    return kind_.find_problems ? kind_.find_problems(cast(settings)) : std::vector<SettingProblem>{};
  }
  Parallelism choose(const void* settings) const override {
    return {.kind = name_,
            .axis = {.name = kind_.axis,
                     .degree = static_cast<int>(cast(settings).degree),
                     .parts_per_rank = kind_.parts_per_rank ? kind_.parts_per_rank(cast(settings)) : 1,
                     .degree_key = kind_.key_prefix + "degree"},
            .apply = [apply = kind_.apply, chosen = cast(settings)](
                         const nn::AnyRef& root, const DeviceMesh& axis) { apply(root, axis, chosen); },
            .is_applied = kind_.is_applied};
  }

 private:
  static const Settings& cast(const void* settings) { return *static_cast<const Settings*>(settings); }

  std::string name_;
  ParallelismKind<Settings> kind_;
};

}  // namespace detail

template <class Settings>
void register_parallelism(const std::string& name, ParallelismKind<Settings> kind) {
  parallelisms().add(name, std::make_shared<const detail::ParallelismOf<Settings>>(name, std::move(kind)));
}

}  // namespace titan
