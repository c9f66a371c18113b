#include "checkpoint/save/rank_tree.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/threads.h"
#include "dist/flight_record.h"

namespace titan::checkpoint::detail {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr dist::Label kUp{.phase = "checkpoint::gather"};
constexpr dist::Label kDown{.phase = "checkpoint::verdict"};
constexpr size_t kShownProblems = 8;
// A store whose process is stopped never answers.
constexpr std::chrono::seconds kLongestAnswer(2);

// ---- sending

// Sends a text, preceded by its number of bytes.
void send_text(dist::Group& group, int peer, const std::string& text, dist::Label label) {
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong);
  group.send(size, peer, label).wait();
  if (text.empty()) return;
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  group.send(bytes, peer, label).wait();
}

std::string receive_text(dist::Group& group, int peer, dist::Label label) {
  at::Tensor size = at::zeros({1}, at::kLong);
  group.receive(size, peer, label).wait();
  const int64_t num_bytes = *size.const_data_ptr<int64_t>();
  TITAN_CHECK(num_bytes >= 0, "rank ", peer, " announces ", num_bytes, " bytes");
  if (num_bytes == 0) return "";
  at::Tensor bytes = at::empty({num_bytes}, at::kByte);
  group.receive(bytes, peer, label).wait();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(num_bytes)};
}

// Returns nothing if the text doesn't arrive in time.
std::optional<std::string> receive_within(Milliseconds limit, const std::shared_ptr<dist::Group>& group,
                                          int peer, dist::Label label) {
  auto text = std::make_shared<std::string>();
  const auto receive = [text, group, peer, label] { *text = receive_text(*group, peer, label); };
  if (!within_in_background(limit, receive)) return std::nullopt;
  return std::move(*text);
}

bool send_within(Milliseconds limit, const std::shared_ptr<dist::Group>& group, int peer, std::string text,
                 dist::Label label) {
  return within_in_background(
      limit, [group, peer, text = std::move(text), label] { send_text(*group, peer, text, label); });
}

Milliseconds time_until(Clock::time_point end, Milliseconds at_least) {
  return std::max(std::chrono::duration_cast<Milliseconds>(end - Clock::now()), at_least);
}

double seconds(Milliseconds time) { return static_cast<double>(time.count()) / 1000; }

// ---- arrivals: each rank records in the job's store which call it has reached. A rank that waits in vain
// for another one that passes on answers can look up whose answer is missing.

// Records that this rank has reached call number `call`. Doesn't throw.
void record_arrival(const dist::World& world, const std::string& prefix, int64_t call) {
  try {
    within_in_background(kLongestAnswer, [world, prefix, call] {
      world.store().set(titan::str(prefix, world.rank()), std::to_string(call));
    });
  } catch (const std::exception&) {
    // Error messages only become less precise.
  }
}

// The ranks among first ... last - 1 that haven't reached call number `call`. Empty if the store doesn't
// answer.
std::vector<int> missing_arrivals(const dist::World& world, const std::string& prefix, int first, int last,
                                  int64_t call) {
  auto found = std::make_shared<std::vector<int>>();
  const auto look = [found, world, prefix, first, last, call] {
    for (int rank = first; rank < last; ++rank) {
      const std::string key = titan::str(prefix, rank);
      if (!world.store().check({key}) || std::stoll(world.store().get_to_str(key)) < call)
        found->push_back(rank);
    }
  };
  try {
    if (!within_in_background(kLongestAnswer, look)) return {};
  } catch (const std::exception&) {
    return {};
  }
  return *found;
}

}  // namespace

int parent_of(int rank) { return rank & (rank - 1); }

int end_below(int rank, int size) { return rank == 0 ? size : std::min(size, rank + (rank & -rank)); }

std::vector<int> children_of(int rank, int size) {
  std::vector<int> children;
  for (int bit = 1; rank + bit < end_below(rank, size); bit *= 2) children.push_back(rank + bit);
  return children;
}

int height_of(int rank, int size) {
  int height = 0;
  for (const int child : children_of(rank, size)) height = std::max(height, 1 + height_of(child, size));
  return height;
}

bool within_in_background(std::chrono::milliseconds limit, std::function<void()> call) {
  return within(limit, [call = std::move(call)] {
    const dist::BackgroundCalls background;
    call();
  });
}

std::string rank_on(size_t rank, const std::string& host) {
  return titan::str("rank ", rank, " (", host, ")");
}

RankTree::RankTree(const dist::World& world, std::shared_ptr<dist::Group> group, const TreeOptions& options)
    : world_(world),
      group_(std::move(group)),
      options_(options),
      arrivals_(titan::str("checkpoint/", options.run_id, "/", options.name, "/")),
      children_(children_of(group_->rank(), group_->size())),
      grace_(std::clamp(options.timeout / 10, Milliseconds(200), Milliseconds(5000))) {
  // Set once, because several threads make the calls; nothing else may set it (dist::kOwnTimeout).
  group_->set_timeout(kNoLimit);
}

std::string RankTree::name_of(int rank) const {
  return rank_on(static_cast<size_t>(rank), options_.hosts[static_cast<size_t>(rank)]);
}

Milliseconds RankTree::longest_gather() const { return options_.timeout + height_of(0, size()) * grace_; }

std::vector<Answer> RankTree::gather(std::string own) {
  std::vector<Answer> answers = {{.rank = rank(), .text = std::move(own)}};
  if (!out_of_step_.empty()) return answers;
  ++call_;
  if (size() > 1) record_arrival(world_, arrivals_, call_);
  lost_.assign(children_.size(), false);
  const Milliseconds limit = options_.timeout + height_of(rank(), size()) * grace_;
  const auto end = Clock::now() + limit;
  for (size_t i = 0; i < children_.size(); ++i) {
    try {
      const auto text = receive_within(time_until(end, grace_), group_, children_[i], kUp);
      lost_[i] = !text;
      if (text) {
        std::ranges::move(from_wire<std::vector<Answer>>(*text), std::back_inserter(answers));
      } else {
        std::ranges::move(lost_below(children_[i], limit), std::back_inserter(answers));
      }
    } catch (const std::exception& error) {
      lost_[i] = true;
      answers.push_back({children_[i], titan::str("is lost: ", error.what()), true});
    }
  }
  std::stable_sort(answers.begin(), answers.end(),
                   [](const Answer& a, const Answer& b) { return a.rank < b.rank; });
  if (rank() != 0) send_up(answers);
  return answers;
}

// The child itself may only be waiting for another rank.
std::vector<Answer> RankTree::lost_below(int child, Milliseconds waited) const {
  const int end = end_below(child, size());
  std::vector<int> missing = missing_arrivals(world_, arrivals_, child, end, call_);
  std::string what = titan::str("didn't answer within ", seconds(waited), " s");
  if (missing.empty()) {
    missing = {child};
    if (end > child + 1) what += titan::str(" (it answers for ranks ", child, " to ", end - 1, ")");
  }
  std::vector<Answer> answers;
  for (const int rank : missing) answers.push_back({rank, what, true});
  return answers;
}

void RankTree::send_up(const std::vector<Answer>& answers) {
  const int parent = parent_of(rank());
  try {
    // The parent may still be busy with its own part.
    if (!send_within(2 * longest_gather(), group_, parent, to_wire(answers), kUp))
      cut_off_ = titan::str(name_of(parent), " didn't accept an answer within ",
                            seconds(2 * longest_gather()), " s");
  } catch (const std::exception& error) {
    cut_off_ = titan::str(name_of(parent), " is lost: ", error.what());
  }
}

Verdict RankTree::receive_verdict() const {
  if (!cut_off_.empty()) return {cut_off_, true};
  const int parent = parent_of(rank());
  // The deeper a rank is, the longer it waits, so that a rank that waits in vain has time to inform those
  // below. The ranks above may first wait for others as long as their limits allow, and then rank 0 does its
  // own work.
  const int depth = std::popcount(static_cast<unsigned>(rank()));
  const Milliseconds limit = options_.timeout + longest_gather() + (depth + 1) * grace_;
  try {
    const auto text = receive_within(limit, group_, parent, kDown);
    if (text) return from_wire<Verdict>(*text);
  } catch (const std::exception& error) {
    return {titan::str(name_of(parent), " is lost: ", error.what()), true};
  }
  std::string what = titan::str(name_of(0), " gave no verdict within ", seconds(limit), " s");
  if (parent != 0) what += titan::str(" (nor did ", name_of(parent), ", which passes it on)");
  return {what, true};
}

Verdict RankTree::spread(Verdict verdict) {
  if (!out_of_step_.empty()) return {out_of_step_, true};
  if (rank() != 0) verdict = receive_verdict();
  const std::string problem = send_down(verdict);
  // The child had answered: only this rank knows that it is lost; the others learn of it at the next call.
  if (!problem.empty() && !verdict.lost)
    verdict = {verdict.text.empty() ? problem : verdict.text + "; " + problem, true};
  if (verdict.lost) out_of_step_ = verdict.text;
  return verdict;
}

// Describes a child that was lost; empty: none was.
std::string RankTree::send_down(const Verdict& verdict) {
  std::string problem;
  const std::string bytes = to_wire(verdict);
  for (size_t i = children_.size(); i-- > 0;) {
    const int child = children_[i];
    try {
      // A lost child may only be late: it gets the verdict if it arrives, but this rank doesn't wait for it.
      const Milliseconds limit = lost_[i] ? Milliseconds(0) : options_.timeout;
      if (!send_within(limit, group_, child, bytes, kDown) && !lost_[i])
        problem = titan::str(name_of(child), " didn't accept the verdict within ", seconds(limit), " s");
    } catch (const std::exception& error) {
      if (!lost_[i]) problem = titan::str(name_of(child), " is lost: ", error.what());
    }
  }
  return problem;
}

Verdict merged_problems(const RankTree& tree, const std::vector<Answer>& answers) {
  const bool all_alike = std::all_of(answers.begin(), answers.end(), [&](const Answer& answer) {
    return !answer.lost && answer.text == answers[0].text;
  });
  if (all_alike) return {answers[0].text, false};
  std::set<std::string> known;
  Verdict verdict;
  size_t num_problems = 0;
  for (const Answer& answer : answers) {
    verdict.lost = verdict.lost || answer.lost;
    // A problem that several ranks share is shown once.
    if (answer.text.empty() || (!answer.lost && !known.insert(answer.text).second)) continue;
    if (++num_problems > kShownProblems) continue;
    verdict.text += titan::str(verdict.text.empty() ? "" : "; ", tree.name_of(answer.rank),
                               answer.lost ? " " : ": ", answer.text);
  }
  if (num_problems > kShownProblems)
    verdict.text += titan::str("; and ", num_problems - kShownProblems, " more ranks");
  return verdict;
}

Verdict unequal(const RankTree& tree, const std::vector<Answer>& answers, const std::string& what) {
  if (tree.rank() != 0) return {};
  for (const Answer& answer : answers) {
    if (answer.lost) return {titan::str(tree.name_of(answer.rank), " ", answer.text), true};
    if (answer.text != answers[0].text)
      return {titan::str(tree.name_of(answer.rank), " ", what, " ", tree.name_of(0)), false};
  }
  return {};
}

Verdict agree(RankTree& tree, const std::string& problem) {
  const auto answers = tree.gather(problem);
  return tree.spread(tree.rank() == 0 ? merged_problems(tree, answers) : Verdict{});
}

std::set<std::string> names_of_stages(const std::vector<std::string>& own, const DeviceMesh& pipeline,
                                      dist::Label label) {
  std::set<std::string> names(own.begin(), own.end());
  if (pipeline.size() == 1) return names;
  for (const std::string& stage : pipeline.group()->all_gather_text(to_wire(own), label))
    names.merge(from_wire<std::set<std::string>>(stage));
  return names;
}

std::string any_text(RankTree& tree, const std::string& text) {
  Verdict verdict;
  for (const Answer& answer : tree.gather(text)) {
    if (answer.lost) verdict = {titan::str(tree.name_of(answer.rank), " ", answer.text), true};
    if (verdict.text.empty()) verdict.text = answer.text;
  }
  verdict = tree.spread(verdict);
  TITAN_CHECK(!verdict.lost, verdict.text);
  return verdict.text;
}

std::string from_rank_0(const dist::World& world, dist::Label label,
                        const std::function<std::string()>& part) {
  std::string text, problem, shared;
  if (world.rank() == 0) {
    problem = problem_of([&] { text = part(); });
    shared = to_wire(problem, text);
  }
  // Not all_gather_text, which allocates the length of the longest text for each rank.
  const auto group = world.everyone();
  shared.resize(static_cast<size_t>(group->sum(static_cast<int64_t>(shared.size()), label)));
  if (world.size() > 1)
    group->broadcast(at::from_blob(shared.data(), {static_cast<int64_t>(shared.size())}, at::kByte), 0, label)
        .wait();
  WireReader{shared}(problem, text);
  if (!problem.empty()) throw Error(problem);
  return text;
}

}  // namespace titan::checkpoint::detail
