// Trainer: saving and loading its state.

#include <exception>
#include <set>
#include <utility>

#include <torch/nn/module.h>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/data/loader.h"
#include "titan/train/checkpoint_state.h"
#include "titan/train/trainer.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

namespace {

constexpr size_t kMostStateShown = 200;  // characters of a saved text, in a message

// One of the ranks that share their rows speaks for all of them.
bool speaks_for_its_rows(const Meshes& meshes) {
  return meshes.pp.rank() == 0 && meshes.rows.rank() == 0 && meshes.tp.rank() == 0;
}

/// The data loader's state: a table of all ranks' lanes.
class DataState : public checkpoint::Stateful {
 public:
  DataState(data::DataLoader& loader, bool speaks) : loader_(loader), speaks_(speaks) {}

  checkpoint::ObjectState state() override {
    return {.tensors = {}, .text = speaks_ ? data::to_json(loader_.state()) : "", .merge = merge_tables};
  }

  void check(const std::string& text) const override {
    try {
      loader_.check_state(data::loader_state_from_json(text));
    } catch (const Error& error) {
      throw ConfigError(str("the checkpoint's dataloader: ", error.what(),
                            " (checkpoint.exclude_from_loading = [\"dataloader\"])"));
    }
  }

  void loaded(const std::string& text) override { loader_.load_state(data::loader_state_from_json(text)); }

 private:
  static std::string merge_tables(const std::vector<std::string>& texts) {
    std::vector<data::LoaderState> parts;
    for (const std::string& text : texts)
      if (!text.empty()) parts.push_back(data::loader_state_from_json(text));
    return data::to_json(data::merge(parts));
  }

  data::DataLoader& loader_;
  bool speaks_;
};

/// The step, the tokens that all ranks have seen, and the policies' states.
class ProgressState : public checkpoint::Stateful {
 public:
  ProgressState(Progress& progress, const TrainerParts& parts, bool speaks)
      : progress_(progress), parts_(parts), speaks_(speaks) {
    std::set<std::string> names = {"step", "tokens"};
    for (const NamedPolicy& each : parts.policies)
      TITAN_CHECK(names.insert(each.name).second, "there are two trainer policies named '", each.name, "'");
  }

  checkpoint::ObjectState state() override {
    const int64_t own = speaks_ ? parts_.window.local_tokens_seen() : 0;
    nlohmann::json tree{{"step", progress_.step}, {"tokens", progress_.tokens_before}};
    for (const auto& [name, policy] : parts_.policies)
      if (const std::string state = policy->state(); !state.empty()) {
        std::string problem;
        tree[name] = parse_json(state, &problem);
        TITAN_CHECK(problem.empty(), "the state of trainer policy '", name, "' is ", problem);
      }
    return {.tensors = {}, .text = std::to_string(own), .merge = [tree](const auto& texts) {
              nlohmann::json merged = tree;
              int64_t tokens = tree["tokens"];
              for (const std::string& text : texts) tokens += std::stoll(text);
              merged["tokens"] = tokens;
              return merged.dump();
            }};
  }

  void loaded(const std::string& text) override {
    const auto tree = parse_json(text);
    const auto step = json_count(tree, "step"), tokens = json_count(tree, "tokens");
    TITAN_CHECK(step && tokens,
                "the checkpoint's train_state is malformed: ", text.substr(0, kMostStateShown));
    progress_.step = *step;
    progress_.tokens_before = *tokens;
    try {
      for (const auto& [name, policy] : parts_.policies)
        if (tree.contains(name)) policy->load(tree[name].dump());
    } catch (const std::exception& error) {
      throw Error(str("the checkpoint's train_state is malformed: ", error.what()));
    }
  }

 private:
  Progress& progress_;
  const TrainerParts& parts_;
  bool speaks_;
};

std::unique_ptr<checkpoint::Stateful> schedule_state(Progress& progress) {
  return std::make_unique<TextState>(
      [&] { return std::to_string(progress.schedule_steps); },
      [&](const std::string& text) {
        TITAN_CHECK(!text.empty() && text.size() < 19 && text.find_first_not_of("0123456789") == text.npos,
                    "the checkpoint's lr_scheduler isn't a number of steps: ", text);
        progress.schedule_steps = std::stoll(text);
      });
}

// A registered buffer is meant to be state. Our own modules register none: they compute such tensors from
// settings.
void warn_of_unsaved_buffers(const TrainerParts& parts) {
  std::string names;
  for (const auto& model : parts.models)
    for (const auto& buffer : model->root().module().named_buffers())
      names += (names.empty() ? "" : ", ") + buffer.key();
  if (!names.empty())
    log::warning_rank0("checkpoints don't hold the model's buffers: " + names +
                       ". If they change during training, make them a saved object (docs/extending.md)");
}

}  // namespace

// A seed checkpoint holds the model alone.
void Trainer::add_saved_state() {
  RunCheckpoints& checkpoints = *parts_.checkpoints;
  const auto add = [&](const std::string& key, std::unique_ptr<checkpoint::Stateful> object) {
    checkpoints.add(key, *object);
    saved_.push_back(std::move(object));
  };
  add("model", std::make_unique<ModelState>(parts_.parameters));
  warn_of_unsaved_buffers(parts_);
  if (options_.seed_checkpoint) return;
  const bool speaks = speaks_for_its_rows(parts_.meshes);
  add("optimizer", std::make_unique<OptimizerState>(parts_.optimizer, parts_.parameters));
  add("lr_scheduler", schedule_state(progress_));
  add("dataloader", std::make_unique<DataState>(parts_.loader, speaks));
  add("train_state", std::make_unique<ProgressState>(progress_, parts_, speaks));
  auto rng = std::make_unique<RngState>(parts_.meshes, parts_.device, options_.seed);
  checkpoints.add_rng(*rng);
  saved_.push_back(std::move(rng));
  for (const std::string& key : saved_objects().names())
    if (auto object = saved_objects().get(key)(parts_)) add(key, std::move(object));
}

Registry<MakeSavedObject>& saved_objects() {
  static Registry<MakeSavedObject> registry("saved object");
  return registry;
}

bool Trainer::load() {
  const PhaseScope load = phase(Phase::Load);
  return parts_.checkpoints && parts_.checkpoints->load();
}

// The state is the checkpoint's again, but the data position isn't rewound. It is saved after the next step,
// so that a run that is killed and restarted doesn't repeat the same data.
bool Trainer::load_before(int64_t step) {
  TITAN_CHECK(parts_.checkpoints, "there are no checkpoints to go back to");
  parts_.checkpoints->finish();
  if (!parts_.checkpoints->load_before(step, {"dataloader"})) return false;
  parts_.window.forget_tokens_seen();
  for (const auto& observer : parts_.observers) observer->begin_after(progress_.step);
  started_at_ = progress_.step;
  save_is_late_ = true;
  last_step_ = last_step();
  return true;
}

void Trainer::save_seed() {
  const PhaseScope finish = phase(Phase::Finish);
  if (options_.on_start) options_.on_start();
  const PhaseScope save = phase(Phase::Save);
  parts_.checkpoints->save_seed();
}

void Trainer::save_if_due() {
  if (!parts_.checkpoints) return;
  parts_.checkpoints->check();
  const int64_t step = progress_.step;
  const bool is_last = step == last_step_;
  const bool to_disk = save_is_late_ || parts_.checkpoints->is_due(step, is_last);
  if (!to_disk && !parts_.checkpoints->is_due_in_memory(step)) return;
  for (const auto& [name, policy] : parts_.policies) policy->before_save(*this);
  save(is_last, to_disk);
}

// A non-finite state isn't saved, so late numbers are read first: rotation after such a save would delete the
// last sound state.
void Trainer::save(bool is_last, bool to_disk) {
  const PhaseScope save = phase(Phase::Save);
  settle();
  const int64_t step = progress_.step;
  std::string reason;
  for (const auto& [name, policy] : parts_.policies)
    if (reason.empty()) reason = policy->why_not_save();
  if (!reason.empty() && !is_last) {
    if (to_disk && !std::exchange(save_is_late_, true))
      log::warning_rank0(str("step ", step, " isn't saved: ", reason));
    return;
  }
  save_is_late_ = false;
  if (!is_last && parts_.checkpoints->is_due_in_memory(step)) parts_.checkpoints->save_in_memory(step);
  if (to_disk) parts_.checkpoints->save(step, is_last);
}

// Whether the state is saved is known only when no save is in progress: one may have failed, or have been
// skipped while another was running. Operators search the log for "is saved", so that is logged only once it
// is true.
void Trainer::save_at_stop(const std::string& reason) {
  if (!is_loaded_)
    return log::info_rank0(reason +
                           " stops the run before it began: nothing was loaded, and nothing was trained");
  const std::string what = str(reason, " stops the run after step ", progress_.step);
  RunCheckpoints* checkpoints = parts_.checkpoints.get();
  const PhaseScope save = phase(Phase::Save);
  if (checkpoints) checkpoints->finish();
  if (progress_.step == started_at_) {
    log::info_rank0(what + ", where it started: nothing was trained");
  } else if (!checkpoints || !checkpoints->is_due(progress_.step, /*is_last=*/true)) {
    log::warning_rank0(what + ": nothing is saved, as set in [checkpoint]");
  } else if (checkpoints->is_saved(progress_.step)) {
    log::info_rank0(what + ", whose state is saved");
  } else {
    log::info_rank0(what + ": its state is being saved");
    for (const auto& [name, policy] : parts_.policies) policy->before_save(*this);
    checkpoints->save_whole(progress_.step);
    log::info_rank0(str("the state after step ", progress_.step, " is saved"));
  }
}

// A rank whose save failed throws that error here; the others point to that rank.
void Trainer::fail_with_save() {
  const PhaseScope save = phase(Phase::Save);
  if (parts_.checkpoints) parts_.checkpoints->finish();
  throw Error("a checkpoint has failed on another rank, whose log has the reason");
}

}  // namespace titan::train
