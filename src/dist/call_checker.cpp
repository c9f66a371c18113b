// Compares each collective of a group across its ranks before it starts, and finds ranks that wait for each
// other in different groups.

#include "dist/backends.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <sstream>
#include <thread>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/flight_record.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::dist {
namespace {

// Members send each other their records as they are.
static_assert(std::is_trivially_copyable_v<CallRecord>);

/// The root of a broadcast; -1: the call has none.
int root_of(const CallRecord& call) { return is_point_to_point(call.op) ? -1 : call.peer; }

bool same_tensors(const CallRecord& a, const CallRecord& b) {
  return a.out == b.out && a.in == b.in && a.num_tensors == b.num_tensors && a.dtype == b.dtype;
}

bool same_call(const CallRecord& a, const CallRecord& b) {
  return same_tensors(a, b) && a.sequence == b.sequence && a.op == b.op && a.reduce == b.reduce &&
         root_of(a) == root_of(b) && std::strcmp(a.phase, b.phase) == 0 &&
         std::strcmp(a.module, b.module) == 0;
}

std::string words_of(const CallSizes& sizes) {
  return str('[', list_str(std::span(sizes.dims).first(static_cast<size_t>(sizes.num_dims))), ']');
}

std::string words_of(const CallRecord& call) {
  static constexpr const char* kReduce[] = {"sum", "max", "min"};
  std::ostringstream text;
  text << name_of(call.op) << " #" << call.sequence;
  if (call.reduce >= 0) text << " (" << kReduce[call.reduce] << ')';
  if (root_of(call) >= 0) text << " from its rank " << root_of(call);
  if (call.out.num_dims >= 0) {
    text << " of ";
    if (call.num_tensors > 1) text << call.num_tensors << " tensors, each ";
    text << c10::toString(call.dtype) << ' ' << words_of(call.in);
    if (call.in != call.out) text << " to " << words_of(call.out);
  }
  if (*call.phase) text << " in " << call.phase;
  if (*call.module) text << " of " << call.module;
  return text.str();
}

/// At most eight of them.
std::string list_ranks(const std::vector<int>& ranks) {
  constexpr size_t most = 8;
  const std::string more = ranks.size() > most ? str(" and ", ranks.size() - most, " more") : "";
  return list_str(std::span(ranks).first(std::min(most, ranks.size()))) + more;
}

/// "ranks 0, 2 call X; rank 1 calls Y": ranks of the job, each call once.
std::string tell_apart(const std::vector<CallRecord>& calls, const std::vector<int>& ranks) {
  std::string message;
  std::vector<bool> told(calls.size(), false);
  for (size_t i = 0; i < calls.size(); ++i) {
    if (told[i]) continue;
    std::vector<int> who;
    for (size_t j = i; j < calls.size(); ++j) {
      if (!same_call(calls[i], calls[j])) continue;
      told[j] = true;
      who.push_back(ranks[j]);
    }
    message += str(message.empty() ? "" : "; ", who.size() > 1 ? "ranks " : "rank ", list_ranks(who),
                   who.size() > 1 ? " call " : " calls ", words_of(calls[i]));
  }
  return message;
}

std::string words_with_group(const CallRecord& call) {
  return str(words_of(call), " in group '", call.group->name, "' of ranks ", list_ranks(call.group->ranks));
}

constexpr const char* kMismatch = "the ranks of the group don't make the same call: ";

/// The error that two ranks wait in calls of different groups.
struct CallMismatch : Error {
  using Error::Error;
};

}  // namespace

// ---- calls of different groups

namespace {

/// A waiting call in the store, one line each.
struct WaitingCall {
  std::string group;       // name, purpose and ranks, which are the same on all members
  std::vector<int> ranks;  // the group's
  uint64_t sequence = 0;   // the call's
  std::string words;

  static std::string name_of(const GroupRecord& group) {
    return str(group.name, '|', group.purpose, '|', list_str(group.ranks));
  }
  static std::string text_of(const CallRecord& call) {
    return str(name_of(*call.group), '\n', list_str(call.group->ranks, " "), '\n', call.sequence, '\n',
               words_with_group(call));
  }
  explicit WaitingCall(const std::string& text) {
    std::istringstream lines(text);
    std::string of_ranks, number;
    std::getline(lines, group);
    std::getline(lines, of_ranks);
    std::getline(lines, number);
    std::getline(lines, words);
    std::istringstream numbers(of_ranks);
    for (int rank = 0; numbers >> rank;) ranks.push_back(rank);
    std::istringstream(number) >> sequence;
  }
};

}  // namespace

void WaitingCalls::reach(const CallRecord& call) {
  withdraw();  // the last call, if it ended in an error
  const std::lock_guard lock(mutex_);
  num_reached_[WaitingCall::name_of(*call.group)] = call.sequence + 1;
}

void WaitingCalls::show(const CallRecord& call) {
  const std::lock_guard lock(mutex_);
  const std::string text = WaitingCall::text_of(call);
  store_->set(std::to_string(rank_), std::vector<uint8_t>(text.begin(), text.end()));
  shown_ = true;
}

// Another rank may be about to read the key, so it stays.
void WaitingCalls::withdraw() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(shown_, false)) store_->set(std::to_string(rank_), std::vector<uint8_t>{'\n'});
}

std::string WaitingCalls::elsewhere(const CallRecord& call, bool only_for_me) {
  const std::lock_guard lock(mutex_);
  std::string message;
  for (const int rank : call.group->ranks) {
    const std::string key = std::to_string(rank);
    if (rank == rank_ || !store_->check({key})) continue;
    const std::vector<uint8_t> bytes = store_->get(key);
    const WaitingCall theirs(std::string(bytes.begin(), bytes.end()));
    if (theirs.words.empty() || theirs.group == WaitingCall::name_of(*call.group)) continue;
    // A call that needs this rank hasn't ended before this rank has reached it.
    const auto reached = num_reached_.find(theirs.group);
    const bool needs_me = std::ranges::find(theirs.ranks, rank_) != theirs.ranks.end() &&
                          (reached == num_reached_.end() || reached->second <= theirs.sequence);
    if (needs_me || !only_for_me) message += str("; rank ", rank, " calls ", theirs.words);
  }
  return message;
}

// ---- calls of one group

CallChecker::CallChecker(const GroupSpec& spec, std::vector<int> ranks, std::shared_ptr<WaitingCalls> waiting)
    : store_(spec.store),
      rank_(spec.rank),
      ranks_(std::move(ranks)),
      timeout_ms_(spec.timeout.count()),
      waiting_(std::move(waiting)) {}

namespace {

constexpr auto kLongestPause = std::chrono::milliseconds(5);

// Counts pauses rather than time, which also passes while this process stands still.
bool completes_soon(c10d::Work& gather) {
  for (int pause = 0; pause < 60 && !gather.isCompleted(); ++pause)
    std::this_thread::sleep_for(kLongestPause);
  return gather.isCompleted();
}

}  // namespace

// After this process has stood still, a gather that its peers have finished is incomplete for a moment, while
// they rightly wait for this rank in their next calls. So it looks again before it reports them.
void CallChecker::check_elsewhere(c10d::Work& gather, const CallRecord& call) const {
  std::string others = waiting_->elsewhere(call, /*only_for_me=*/true);
  while (!others.empty() && !completes_soon(gather)) {
    const std::string before = std::exchange(others, waiting_->elsewhere(call, /*only_for_me=*/true));
    if (others == before && !gather.isCompleted())
      throw CallMismatch(
          str(kMismatch, "rank ", waiting_->rank(), " calls ", words_with_group(call), others));
  }
}

// Looks at the other ranks' calls less and less often, because a store serves all ranks. Background threads
// take no part: while one waits, the rank's main thread may reach any other call.
void CallChecker::wait_for_members(c10d::Work& gather, const CallRecord& call) const {
  using Clock = std::chrono::steady_clock;
  if (BackgroundCalls::active()) return;
  waiting_->reach(call);
  std::chrono::nanoseconds until_look = std::min<std::chrono::milliseconds>(
      std::chrono::seconds(1), std::chrono::milliseconds(timeout_ms_) / 4);
  auto next_look = Clock::now() + until_look;
  auto pause = std::chrono::microseconds(20);
  for (; !gather.isCompleted(); pause = std::min<std::chrono::microseconds>(2 * pause, kLongestPause)) {
    if (Clock::now() >= next_look) {
      waiting_->show(call);
      check_elsewhere(gather, call);
      until_look *= 2;
      next_look = Clock::now() + until_look;
    }
    std::this_thread::sleep_for(pause);
  }
  gather.wait();
  waiting_->withdraw();
}

void CallChecker::check(const CallRecord& call, c10d::Backend& backend) const {
  const auto bytes = static_cast<int64_t>(sizeof(CallRecord));
  at::Tensor in = at::empty({bytes}, at::kByte),
             out = at::empty({bytes * static_cast<int64_t>(ranks_.size())}, at::kByte);
  std::memcpy(in.data_ptr(), &call, sizeof(call));
  try {
    const auto gather = backend._allgather_base(out, in);
    wait_for_members(*gather, call);
    gather->wait();
  } catch (const CallMismatch&) {
    throw;
  } catch (const std::exception& error) {
    std::string others;
    try {
      others = waiting_->elsewhere(call, /*only_for_me=*/false);
    } catch (const std::exception&) {
      // The store is gone, too: the first error says more.
    }
    throw Error(str(
        "debug.check_collectives: not all ranks of the group made the call: ", first_line_of(error), others));
  }
  std::vector<CallRecord> calls(ranks_.size());
  std::memcpy(static_cast<void*>(calls.data()), out.data_ptr(), calls.size() * sizeof(CallRecord));
  const auto is_mine = [&](const CallRecord& theirs) { return same_call(theirs, call); };
  if (!std::ranges::all_of(calls, is_mine)) throw Error(kMismatch + tell_apart(calls, ranks_));
}

std::string CallChecker::key_of(int from, int to, uint64_t sequence) const {
  return str(from, ">", to, "/", sequence);
}

void CallChecker::announce_sent(const CallRecord& call) const {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&call);
  store_->set(key_of(rank_, call.peer, call.sequence), std::vector<uint8_t>(bytes, bytes + sizeof(call)));
}

// Polls the store: a wait inside it would block other threads of this process that use it.
void CallChecker::check_received(const CallRecord& call) const {
  const std::string key = key_of(call.peer, rank_, call.sequence);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms_);
  auto pause = std::chrono::microseconds(50);
  while (!store_->check({key})) {
    TITAN_CHECK(std::chrono::steady_clock::now() < deadline, "debug.check_collectives: rank ",
                ranks_[static_cast<size_t>(call.peer)], " didn't send within ",
                static_cast<double>(timeout_ms_) / 1000, " s");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(5000));
  }
  const std::vector<uint8_t> bytes = store_->get(key);
  store_->deleteKey(key);
  CallRecord theirs;
  TITAN_CHECK(bytes.size() == sizeof(theirs), "the ranks of the group run different builds");
  std::memcpy(static_cast<void*>(&theirs), bytes.data(), sizeof(theirs));
  if (!same_tensors(theirs, call))
    throw Error(str(kMismatch, "rank ", ranks_[static_cast<size_t>(call.peer)], " calls ", words_of(theirs),
                    "; rank ", ranks_[static_cast<size_t>(rank_)], " calls ", words_of(call)));
}

}  // namespace titan::dist
