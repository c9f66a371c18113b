#include "call_checker.h"

#include <cstring>
#include <thread>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/backends.h"
#include "dist/flight_record.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::dist {
namespace {

/// What has to be equal on all members. Made in zeroed memory, so that its bytes can be sent as they are.
struct CallPrint {
  uint64_t sequence;
  CallSizes out, in;
  int64_t op, reduce, root, dtype;
  char phase[sizeof(CallRecord::phase)];
  char module[sizeof(CallRecord::module)];
};
static_assert(std::is_trivially_copyable_v<CallPrint>);

CallPrint print_of(const CallRecord& call) {
  CallPrint print;
  std::memset(static_cast<void*>(&print), 0, sizeof(print));
  print.sequence = call.sequence;
  print.out = call.out;
  print.in = call.in;
  print.op = static_cast<int64_t>(call.op);
  print.reduce = call.reduce;
  print.root = is_point_to_point(call.op) ? -1 : call.peer;
  print.dtype = static_cast<int64_t>(call.dtype);
  std::memcpy(print.phase, call.phase, std::strlen(call.phase));
  std::memcpy(print.module, call.module, std::strlen(call.module));
  return print;
}

bool same_tensors(const CallPrint& a, const CallPrint& b) {
  return a.out == b.out && a.in == b.in && a.dtype == b.dtype;
}

bool same_call(const CallPrint& a, const CallPrint& b) {
  return same_tensors(a, b) && a.sequence == b.sequence && a.op == b.op && a.reduce == b.reduce &&
         a.root == b.root && std::strcmp(a.phase, b.phase) == 0 && std::strcmp(a.module, b.module) == 0;
}

void put_sizes(std::ostringstream& text, const CallSizes& sizes) {
  text << '[';
  for (int64_t dim = 0; dim < sizes.num_dims; ++dim)
    text << (dim > 0 ? ", " : "") << sizes.dims[static_cast<size_t>(dim)];
  text << ']';
}

std::string words_of(const CallPrint& print) {
  static constexpr const char* kReduce[] = {"sum", "max", "min"};
  std::ostringstream text;
  text << name_of(static_cast<CollectiveOp>(print.op)) << " #" << print.sequence;
  if (print.reduce >= 0) text << " (" << kReduce[print.reduce] << ')';
  if (print.root >= 0) text << " from its rank " << print.root;
  if (print.out.num_dims >= 0) {
    text << " of " << c10::toString(static_cast<c10::ScalarType>(print.dtype)) << ' ';
    put_sizes(text, print.in);
    if (!(print.in == print.out)) {
      text << " to ";
      put_sizes(text, print.out);
    }
  }
  if (*print.phase) text << " in " << print.phase;
  if (*print.module) text << " of " << print.module;
  return text.str();
}

/// "ranks 0, 2 call X; rank 1 calls Y": ranks of the job, each call once.
std::string tell_apart(const std::vector<CallPrint>& prints, const std::vector<int>& ranks) {
  std::string message;
  std::vector<bool> told(prints.size(), false);
  for (size_t i = 0; i < prints.size(); ++i) {
    if (told[i]) continue;
    std::string who;
    size_t count = 0;
    for (size_t j = i; j < prints.size(); ++j) {
      if (!same_call(prints[i], prints[j])) continue;
      told[j] = true;
      if (++count <= 8) who += str(count > 1 ? ", " : "", ranks[j]);
    }
    if (count > 8) who += str(" and ", count - 8, " more");
    message += str(message.empty() ? "" : "; ", count > 1 ? "ranks " : "rank ", who,
                   count > 1 ? " call " : " calls ", words_of(prints[i]));
  }
  return message;
}

constexpr const char* kMismatch = "the ranks of the group don't make the same call: ";

}  // namespace

CallChecker::CallChecker(const GroupSpec& spec, std::vector<int> ranks)
    : store_(spec.store), rank_(spec.rank), ranks_(std::move(ranks)), timeout_ms_(spec.timeout.count()) {}

void CallChecker::check(const CallRecord& call, c10d::Backend& backend) const {
  const CallPrint mine = print_of(call);
  const auto bytes = static_cast<int64_t>(sizeof(CallPrint));
  at::Tensor in = at::empty({bytes}, at::kByte),
             out = at::empty({bytes * static_cast<int64_t>(ranks_.size())}, at::kByte);
  std::memcpy(in.data_ptr(), &mine, sizeof(mine));
  try {
    backend._allgather_base(out, in)->wait();
  } catch (const std::exception& error) {
    throw Error(
        str("debug.check_collectives: not all ranks of the group came to the call: ", first_line_of(error)));
  }
  std::vector<CallPrint> prints(ranks_.size());
  std::memcpy(static_cast<void*>(prints.data()), out.data_ptr(), prints.size() * sizeof(CallPrint));
  bool equal = true;
  for (const CallPrint& print : prints) equal = equal && same_call(print, mine);
  if (!equal) throw Error(kMismatch + tell_apart(prints, ranks_));
}

std::string CallChecker::key_of(int from, int to, uint64_t sequence) const {
  return str(from, ">", to, "/", sequence);
}

void CallChecker::announce_sent(const CallRecord& call) const {
  const CallPrint print = print_of(call);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&print);
  store_->set(key_of(rank_, call.peer, call.sequence), std::vector<uint8_t>(bytes, bytes + sizeof(print)));
}

// Polls the store: a wait inside it would block other threads of this process that use it.
void CallChecker::check_received(const CallRecord& call) const {
  const std::string key = key_of(call.peer, rank_, call.sequence);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms_);
  auto pause = std::chrono::microseconds(50);
  while (!store_->check({key})) {
    TITAN_CHECK(std::chrono::steady_clock::now() < deadline, "debug.check_collectives: rank ",
                ranks_[static_cast<size_t>(call.peer)], " didn't come to the send within ",
                static_cast<double>(timeout_ms_) / 1000, " s");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(5000));
  }
  const std::vector<uint8_t> bytes = store_->get(key);
  store_->deleteKey(key);
  CallPrint theirs;
  TITAN_CHECK(bytes.size() == sizeof(theirs), "the ranks of the group run different builds");
  std::memcpy(static_cast<void*>(&theirs), bytes.data(), sizeof(theirs));
  const CallPrint mine = print_of(call);
  if (!same_tensors(theirs, mine))
    throw Error(str(kMismatch, "rank ", ranks_[static_cast<size_t>(call.peer)], " calls ", words_of(theirs),
                    "; rank ", ranks_[static_cast<size_t>(rank_)], " calls ", words_of(mine)));
}

}  // namespace titan::dist
