// Compares each collective of a group across its ranks before it starts.

#include "dist/backends.h"

#include <algorithm>
#include <cstring>
#include <span>
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
  return a.out == b.out && a.in == b.in && a.dtype == b.dtype;
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
    text << " of " << c10::toString(call.dtype) << ' ' << words_of(call.in);
    if (call.in != call.out) text << " to " << words_of(call.out);
  }
  if (*call.phase) text << " in " << call.phase;
  if (*call.module) text << " of " << call.module;
  return text.str();
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
    constexpr size_t most = 8;
    const std::string more = who.size() > most ? str(" and ", who.size() - most, " more") : "";
    message += str(message.empty() ? "" : "; ", who.size() > 1 ? "ranks " : "rank ",
                   list_str(std::span(who).first(std::min(most, who.size()))), more,
                   who.size() > 1 ? " call " : " calls ", words_of(calls[i]));
  }
  return message;
}

constexpr const char* kMismatch = "the ranks of the group don't make the same call: ";

}  // namespace

CallChecker::CallChecker(const GroupSpec& spec, std::vector<int> ranks)
    : store_(spec.store), rank_(spec.rank), ranks_(std::move(ranks)), timeout_ms_(spec.timeout.count()) {}

void CallChecker::check(const CallRecord& call, c10d::Backend& backend) const {
  const auto bytes = static_cast<int64_t>(sizeof(CallRecord));
  at::Tensor in = at::empty({bytes}, at::kByte),
             out = at::empty({bytes * static_cast<int64_t>(ranks_.size())}, at::kByte);
  std::memcpy(in.data_ptr(), &call, sizeof(call));
  try {
    backend._allgather_base(out, in)->wait();
  } catch (const std::exception& error) {
    throw Error(
        str("debug.check_collectives: not all ranks of the group made the call: ", first_line_of(error)));
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
