// Loading: every rank reads the manifest, says what keeps it from loading, and reads its parts when nobody
// has anything against it.

#include <algorithm>
#include <chrono>
#include <exception>
#include <sstream>

#include "agreement.h"
#include "checkpointer_impl.h"
#include "load_state.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "wire.h"

namespace titan::checkpoint {

using detail::agree;
using detail::Answer;
using detail::KeyedState;
using detail::NamedTensor;
using detail::throw_if;
using detail::Verdict;

namespace {

using Clock = std::chrono::steady_clock;

constexpr dist::Label kLoadLabel{.phase = "checkpoint::load"};
// Of one rank; a wrong model has all of its tensors wrong.
constexpr size_t kToldProblems = 100;

std::string joined_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), kToldProblems); ++i) text += (i == 0 ? "" : "\n") + lines[i];
  if (lines.size() > kToldProblems) text += titan::str("\nand ", lines.size() - kToldProblems, " more");
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Each line once, in the order in which the ranks have them.
Verdict merged_lines(const detail::RankTree& tree, const std::vector<Answer>& answers) {
  std::set<std::string> known;
  std::vector<std::string> lines;
  for (const Answer& answer : answers) {
    if (answer.lost) return {titan::str(tree.name_of(answer.rank), " ", answer.text), true};
    for (const std::string& line : lines_of(answer.text))
      if (known.insert(line).second) lines.push_back(line);
  }
  return {joined_lines(lines), false};
}

// What went wrong on this rank, for the others.
template <class Part>
std::string problem_of(Part part) {
  try {
    part();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

void Checkpointer::Impl::check_problems(const std::filesystem::path& folder,
                                        const std::vector<std::string>& problems) {
  const auto answers = control_->gather(joined_lines(problems));
  const Verdict verdict = control_->spread(world.rank() == 0 ? merged_lines(*control_, answers) : Verdict{});
  if (verdict.lost) throw Error(verdict.text);
  std::vector<std::string> lines = lines_of(verdict.text);
  for (std::string& line : lines) line = titan::str(folder.string(), ": ", line);
  if (!lines.empty()) throw ConfigError(std::move(lines));
}

std::set<std::string> Checkpointer::Impl::names_of_all_stages(const std::vector<NamedTensor>& tensors) const {
  detail::WireWriter out;
  for (const NamedTensor& tensor : tensors) out.text(tensor.name);
  std::vector<std::string> stages = {out.take()};
  if (pipeline.size() > 1) stages = pipeline.group()->all_gather_text(stages[0], kLoadLabel);
  std::set<std::string> names;
  for (const std::string& stage : stages)
    for (detail::WireReader in(stage); !in.done();) names.insert(in.text());
  return names;
}

std::vector<NamedTensor> Checkpointer::Impl::tensors_to_load(const std::filesystem::path& folder,
                                                             const LoadOptions& load_options,
                                                             const Manifest& manifest,
                                                             std::set<std::string>& keys) {
  std::vector<std::string> registered, problems;
  for (const auto& [key, object] : objects) registered.push_back(key);
  keys = detail::keys_to_load(registered, load_options, manifest, problems);
  std::vector<NamedTensor> tensors;
  throw_if(agree(*control_, problem_of([&] { tensors = detail::tensors_of(states(keys)); })));
  const auto names = names_of_all_stages(tensors);
  for (std::string& line : detail::differences(tensors, names, keys, load_options, manifest))
    problems.push_back(std::move(line));
  check_problems(folder, problems);
  return tensors;
}

Loaded Checkpointer::Impl::load(const std::filesystem::path& folder, const LoadOptions& load_options) {
  const auto start = Clock::now();
  throw_if(agree(*control_, wait_for_last()));
  std::optional<SavedState> saved;
  throw_if(agree(*control_, problem_of([&] { saved.emplace(folder); })));
  const auto answers = control_->gather(digest_of(to_text(saved->manifest())));
  throw_if(control_->spread(unequal(*control_, answers, "reads another manifest there than")));
  Loaded loaded{.manifest = saved->manifest()};
  std::set<std::string> keys;
  const auto tensors = tensors_to_load(folder, load_options, loaded.manifest, keys);
  if (load_options.bring_files)
    load_options.bring_files(loaded.manifest, detail::ranks_read(saved->table(), tensors));
  const auto half_way = [&](const std::string& problem) {
    const Verdict verdict = agree(*control_, problem);
    if (!verdict.text.empty())
      throw Error(titan::str("loading ", folder.string(),
                             " failed half-way, so that some of the state is the "
                             "checkpoint's and some isn't: ",
                             verdict.text));
  };
  half_way(problem_of([&] { detail::read_tensors(*saved, tensors, options.num_threads); }));
  half_way(problem_of([&] {
    for (const std::string& key : keys) objects.at(key)->loaded(loaded.manifest.texts[key]);
  }));
  loaded.num_bytes_read = saved->bytes_read();
  loaded.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  log::debug(
      titan::str("loaded ", folder.string(), " (step ", loaded.manifest.step, ") in ", loaded.seconds, " s"));
  return loaded;
}

}  // namespace titan::checkpoint
