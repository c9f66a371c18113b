#include "train/trainer_state.h"

#include <exception>
#include <set>

#include <torch/nn/module.h>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/data/loader.h"
#include "titan/train/checkpoint_state.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

namespace {

constexpr size_t kMostStateShown = 200;  // of a text in a message

// One of the ranks that share their rows speaks for all of them.
bool speaks_for_its_rows(const Meshes& meshes) {
  return meshes.pp.rank() == 0 && meshes.rows.rank() == 0 && meshes.tp.rank() == 0;
}

/// A table of all ranks' lanes.
class DataState : public checkpoint::Stateful {
 public:
  DataState(data::DataLoader& loader, bool speaks) : loader_(loader), speaks_(speaks) {}

  checkpoint::ObjectState state() override {
    return {.tensors = {}, .text = speaks_ ? data::to_json(loader_.state()) : "", .merge = merge_tables};
  }

  void loaded(const std::string& text) override {
    try {
      loader_.load_state(data::loader_state_from_json(text));
    } catch (const Error& error) {
      throw ConfigError(str("the checkpoint's dataloader: ", error.what(),
                            " (checkpoint.exclude_from_loading = [\"dataloader\"])"));
    }
  }

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
                "the checkpoint's train_state isn't a trainer's: ", text.substr(0, kMostStateShown));
    progress_.step = *step;
    progress_.tokens_before = *tokens;
    try {
      for (const auto& [name, policy] : parts_.policies)
        if (tree.contains(name)) policy->load(tree[name].dump());
    } catch (const std::exception& error) {
      throw Error(str("the checkpoint's train_state isn't a trainer's: ", error.what()));
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

// A registered buffer says that it is state. Our modules compute such tensors from settings and register
// none.
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

StatefulObjects add_trainer_state(TrainerParts& parts, Progress& progress, const TrainerOptions& options) {
  StatefulObjects objects;
  RunCheckpoints& checkpoints = *parts.checkpoints;
  const auto add = [&](const std::string& key, std::unique_ptr<checkpoint::Stateful> object) {
    checkpoints.add(key, *object);
    objects.push_back(std::move(object));
  };
  add("model", std::make_unique<ModelState>(parts.parameters));
  warn_of_unsaved_buffers(parts);
  if (options.seed_checkpoint) return objects;
  const bool speaks = speaks_for_its_rows(parts.meshes);
  add("optimizer", std::make_unique<OptimizerState>(parts.optimizer, parts.parameters));
  add("lr_scheduler", schedule_state(progress));
  add("dataloader", std::make_unique<DataState>(parts.loader, speaks));
  add("train_state", std::make_unique<ProgressState>(progress, parts, speaks));
  auto rng = std::make_unique<RngState>(parts.meshes, parts.device, options.seed);
  checkpoints.add_rng(*rng);
  objects.push_back(std::move(rng));
  for (const std::string& key : saved_objects().names())
    if (auto object = saved_objects().get(key)(parts)) add(key, std::move(object));
  return objects;
}

Registry<MakeSavedObject>& saved_objects() {
  static Registry<MakeSavedObject> registry("saved object");
  return registry;
}

}  // namespace titan::train
