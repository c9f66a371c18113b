// The checker: the ranks go through their actions without time, each as far as it can. What is left over then
// waits in a circle.

#include "parallel/pipeline/schedule/check.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

class Progress {
 public:
  explicit Progress(CheckCase& check)
      : check_(check),
        schedule_(check.schedule),
        channels_(check.schedule),
        num_open_(channels_.size(), 0),
        next_(check.schedule.ranks.size(), 0),
        forward_done_(check.schedule, false),
        backward_done_(check.schedule, false),
        runnable_(check.schedule.num_ranks()) {}

  void check() {
    while (const auto rank = runnable_.next())
      while (!at_end(*rank) && can_run(action(*rank))) run(*rank);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank)
      if (!at_end(rank)) return report_circle(rank);
  }

 private:
  bool at_end(int rank) const { return next_[rank] == schedule_.ranks[rank].size(); }
  const Action& action(int rank) const { return schedule_.ranks[rank][next_[rank]]; }

  static bool is_send(Kind kind) { return kind == Kind::SendForward || kind == Kind::SendBackward; }

  // What the F, B or I works on is there: made, and, if messages are in the schedule, sent. That it was
  // received, and that what is made on the same rank stands ahead, is known already.
  bool can_run(const Action& action) const {
    if (is_send(action.kind)) return num_open_[channels_.of(action)] < check_.options.channel_capacity;
    const auto receive = receive_for(schedule_, action);
    if (!receive) return true;
    return (receive->kind == Kind::ReceiveForward ? forward_done_ : backward_done_)(send_of(*receive));
  }

  // Marks a stage's output or input gradient as there for its neighbour on another rank.
  void hand_over(const Action& send) {
    (send.kind == Kind::SendForward ? forward_done_ : backward_done_)(send) = true;
    runnable_.wake(channels_.receiver(channels_.of(send)));
  }

  void run(int rank) {
    const Action& done = action(rank);
    ++next_[rank];
    if (is_send(done.kind)) {
      ++num_open_[channels_.of(done)];
      hand_over(done);
    } else if (is_communication(done.kind)) {
      --num_open_[channels_.of(done)];
      runnable_.wake(channels_.sender(channels_.of(done)));
    } else if (!check_.communicates) {
      if (const auto send = send_behind(schedule_, done)) hand_over(*send);
    }
  }

  /// The rank that a standing rank waits for.
  int waits_for(int rank) const {
    if (is_send(action(rank).kind)) return channels_.receiver(channels_.of(action(rank)));
    return channels_.sender(channels_.of(*receive_for(schedule_, action(rank))));
  }

  std::string wait_of(int rank) const {
    const std::string place = str("rank ", rank, " at action ", next_[rank], " (", action(rank), ") ");
    if (is_send(action(rank).kind))
      return str(place, "waits until rank ", waits_for(rank), " posts ", receive_of(action(rank)), " (",
                 check_.options.channel_capacity, " sent without a receive allowed)");
    const Action receive = *receive_for(schedule_, action(rank));
    const Action made_by = send_of(receive);
    if (check_.communicates) return str(place, "waits for ", made_by, " of rank ", waits_for(rank));
    const bool forward = made_by.kind == Kind::SendForward;
    return str(place, "waits for ",
               Action{forward ? Kind::Forward : Kind::Backward, made_by.stage, made_by.micro_batch},
               forward ? "" : " (or its I)", " of rank ", waits_for(rank));
  }

  // Every standing rank waits for a standing one, so the way from any ends in a circle.
  void report_circle(int rank) {
    for (int i = 0; i < schedule_.num_ranks(); ++i) rank = waits_for(rank);
    std::string circle;
    int at = rank;
    do {
      circle += (circle.empty() ? "" : "; ") + wait_of(at);
      at = waits_for(at);
    } while (at != rank);
    check_.findings.add(rank, static_cast<int>(next_[rank]), "deadlock, ranks wait for each other: ", circle);
  }

  CheckCase& check_;
  const Schedule& schedule_;
  Channels channels_;
  std::vector<int> num_open_;  // per channel: sent, less received; negative where receives are posted ahead
  std::vector<size_t> next_;   // per rank
  PerMicroBatch<char> forward_done_, backward_done_;
  Runnable runnable_;
};

}  // namespace

void check_progress(CheckCase& check) { Progress(check).check(); }

}  // namespace titan::pipeline
