#include "plan/simulation.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "titan/core/error.h"

namespace titan::plan {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// A point that a stream reaches, in one rank: an event of the trace, the begin or end of a batch of collectives, or one of the simulation's own.
using Point = size_t;
Point point_of_event(int64_t event) { return 4 * static_cast<size_t>(event); }
Point begin_of_batch(int64_t batch) { return 4 * static_cast<size_t>(batch) + 1; }
Point end_of_batch(int64_t batch) { return 4 * static_cast<size_t>(batch) + 2; }
Point own_point(size_t number) { return 4 * number + 3; }

/// An entry of a stream's queue.
struct Item {
  enum class Kind : uint8_t { Work, Copy, Reach, Wait, Batch, EndOfStep } kind;
  Activity activity = Activity::Compute;
  KernelKind kernel = KernelKind::Other;
  int32_t num_calls = 0;  // a Batch's collectives of the trace, from first_call
  double issued = 0;      // by the host
  double seconds = 0;     // Work's and a Copy's
  Point point = 0;        // for Reach and Wait
  size_t entry = 0;       // its place in the trace, for spans
  size_t first_call = 0;
};

struct Stream {
  int64_t number = 0;  // below 0: a group's own
  std::deque<Item> items;
  bool is_running = false;  // the first item
  double began = 0;
  double remaining = 0;       // for Work, in seconds at full speed
  size_t open_transfers = 0;  // a begun Batch's or Copy's
};

/// The links that transfers of a rank share. The bus to the host has a lane for each direction.
enum class Links : uint8_t { InHost, BetweenHosts, ToHost, ToDevice };
constexpr size_t kNumLinks = 4;
Links links_of(const CostModel::Transfer& cost) {
  return cost.between_hosts ? Links::BetweenHosts : Links::InHost;
}

/// One side or both of a collective in progress, or a copy between the host and the device.
struct Transfer {
  struct End {
    size_t rank = 0, stream = 0;  // places in their lists
  };
  double remaining = 0;
  Links links = Links::InHost;
  std::vector<End> ends;
  double updated = 0, speed = 1;

  double end() const { return updated + remaining / speed; }
  void settle(double now) {
    remaining = std::max(0.0, remaining - (now - updated) * speed);
    updated = now;
  }
};

/// The properties that a launch's time depends on.
struct LaunchKey {
  int name;
  double flops, bytes;
  int64_t batches, m, n, k;
  bool operator==(const LaunchKey&) const = default;
};
struct HashOfLaunch {
  size_t operator()(const LaunchKey& key) const {
    size_t hash = static_cast<size_t>(key.name);
    for (const size_t part : {std::hash<double>()(key.flops), std::hash<double>()(key.bytes),
                              static_cast<size_t>(key.m * 31 + key.n * 17 + key.k)})
      hash = hash * 1000003 + part;
    return hash;
  }
};

struct Rank {
  const Trace* trace = nullptr;
  int world_rank = 0;

  // The host.
  size_t next_entry = 0;
  double host_time = 0;
  bool is_recording = false;
  bool host_waits = false;
  Point host_awaits = 0;
  size_t num_own_points = 0;

  // The device.
  std::vector<Stream> streams;  // the first one is the default
  static constexpr int32_t kNotQueued = -1;
  std::vector<int32_t> stream_of_point;
  std::vector<bool> reached;
  std::array<int, kNumLinks> active{};  // transfers
  int working = 0;                      // kernels
  double worked = 0;                    // seconds since its last collective or send
  double updated = 0;                   // when its kernels' progress was last counted
  double next = 0;  // when a kernel ends or an item's issue comes, if nothing else changes
  bool is_dirty = true;

  std::unordered_map<int, int> shared_communicators;          // its numbers of groups to everybody's
  std::map<std::tuple<int, size_t, bool>, int64_t> messages;  // by communicator, peer and direction
  std::unordered_map<int, int64_t> calls;                     // by communicator
  std::unordered_map<LaunchKey, CostModel::KernelTime, HashOfLaunch> times;
  std::unordered_map<int64_t, size_t> gathers;  // in progress: an entry of each batch
  int steps_ended = 0;
  double step_ends[2] = {0, 0};

  bool was_queued(Point point) const {
    return point < stream_of_point.size() && stream_of_point[point] != kNotQueued;
  }
  bool has_reached(Point point) const { return point < reached.size() && reached[point]; }
  // Copies to and from the host take no multiprocessors.
  bool communicates() const {
    return active[static_cast<size_t>(Links::InHost)] + active[static_cast<size_t>(Links::BetweenHosts)] > 0;
  }
};

class Simulation {
 public:
  Simulation(const std::vector<SimulatedRank>& ranks, int ranks_of_stage, const CostModel& costs,
             bool with_spans)
      : costs_(costs), ranks_of_stage_(ranks_of_stage), with_spans_(with_spans) {
    for (const SimulatedRank& each : ranks) {
      Rank& rank = ranks_.emplace_back();
      rank.trace = each.trace;
      rank.world_rank = each.world_rank;
      rank.next_entry = step_before_last(*each.trace);
      rank.streams.push_back({.number = each.trace->computing_stream(), .items = {}});
    }
    result_.ranks.resize(ranks.size());
  }

  StepTime run() {
    for (size_t r = 0; r < ranks_.size(); ++r) run_host(r);
    while (true) {
      bool any = true;
      while (any) {
        any = false;
        for (size_t r = 0; r < ranks_.size(); ++r)
          if (ranks_[r].is_dirty) {
            any = true;
            advance_streams(r);
          }
      }
      double next = kNever;
      for (const Rank& rank : ranks_) next = std::min(next, rank.next);
      for (const Transfer& transfer : transfers_) next = std::min(next, transfer.end());
      if (next == kNever) break;
      now_ = std::max(now_, next);
      for (size_t r = 0; r < ranks_.size(); ++r)
        if (ranks_[r].next <= now_) touch(r);
      end_transfers();
    }
    return finished();
  }

 private:
  static size_t step_before_last(const Trace& trace) {
    const auto before_last = static_cast<size_t>(trace.num_steps()) - 2;
    const auto found = std::ranges::find_if(trace.entries(), [&](const Entry& entry) {
      return entry.kind == Entry::Kind::Step && entry.index == before_last;
    });
    return static_cast<size_t>(found - trace.entries().begin());
  }
  size_t pipeline_rank_of(int world_rank) const { return static_cast<size_t>(world_rank / ranks_of_stage_); }

  // ---- the host

  void run_host(size_t r) {
    Rank& rank = ranks_[r];
    const std::vector<Entry>& entries = rank.trace->entries();
    while (rank.next_entry < entries.size() && !rank.host_waits) {
      const size_t index = rank.next_entry++;
      const Entry& entry = entries[index];
      switch (entry.kind) {
        case Entry::Kind::Launch:
          launch(rank, index);
          break;
        case Entry::Kind::Collective:
          call(rank, index);
          break;
        case Entry::Kind::Sync:
          synchronize(rank, rank.trace->syncs()[entry.index]);
          break;
        case Entry::Kind::Step:
          if (index > step_before_last(*rank.trace)) queue_end_of_step(rank);
          break;
        case Entry::Kind::Allocate:
        case Entry::Kind::Free:
          break;
      }
    }
    if (rank.next_entry == entries.size() && !rank.host_waits) {
      ++rank.next_entry;
      queue_end_of_step(rank);
    }
  }

  static void queue_end_of_step(Rank& rank) {
    queue(rank, rank.trace->computing_stream(), {.kind = Item::Kind::EndOfStep});
  }

  void host_launches(Rank& rank, double launches) const {
    if (!rank.is_recording) rank.host_time += launches * costs_.host_seconds();
  }

  static size_t place_of(Rank& rank, int64_t stream) {
    const auto found = std::ranges::find(rank.streams, stream, &Stream::number);
    if (found != rank.streams.end()) return static_cast<size_t>(found - rank.streams.begin());
    rank.streams.push_back({.number = stream, .items = {}});
    return rank.streams.size() - 1;
  }

  static void queue(Rank& rank, int64_t stream, Item item) {
    item.issued = rank.host_time;
    const size_t place = place_of(rank, stream);
    if (item.kind == Item::Kind::Reach) {
      if (item.point >= rank.stream_of_point.size()) {
        rank.stream_of_point.resize(2 * item.point + 4, Rank::kNotQueued);
        rank.reached.resize(2 * item.point + 4, false);
      }
      rank.stream_of_point[item.point] = static_cast<int32_t>(place);
    }
    rank.streams[place].items.push_back(item);
  }

  const CostModel::KernelTime& time_of(Rank& rank, const Launch& launch) const {
    const auto& [batches, m, n, k] = launch.shape;
    const LaunchKey key{
        launch.name, launch.flops, launch.bytes_read + launch.bytes_written, batches, m, n, k};
    const auto found = rank.times.find(key);
    if (found != rank.times.end()) return found->second;
    return rank.times.emplace(key, costs_.of(launch, rank.trace->name(launch.name))).first->second;
  }

  void launch(Rank& rank, size_t index) {
    const Launch& launch = rank.trace->launches()[rank.trace->entries()[index].index];
    const CostModel::KernelTime& time = time_of(rank, launch);
    host_launches(rank, time.launches);
    const std::string& name = rank.trace->name(launch.name);
    const bool is_optimizer = rank.trace->name(launch.module).starts_with("optimizer");
    queue(rank, launch.stream,
          {.kind = costs_.is_copy_over_bus(name) ? Item::Kind::Copy : Item::Kind::Work,
           .activity = is_optimizer ? Activity::Optimizer : Activity::Compute,
           .kernel = kind_of(launch, name),
           .seconds = time.seconds,
           .entry = index});
  }

  void copies(Rank& rank, size_t entry, int64_t stream) const {
    const Collective& call = rank.trace->collectives()[rank.trace->entries()[entry].index];
    const CostModel::KernelTime time = costs_.of_copies(*rank.trace, call);
    if (time.launches == 0) return;
    host_launches(rank, time.launches);
    queue(rank, stream, {.kind = Item::Kind::Work, .seconds = time.seconds, .entry = entry});
  }

  // The calls of a batch follow each other in the trace.
  void call(Rank& rank, size_t index) {
    const std::vector<Entry>& entries = rank.trace->entries();
    const std::vector<Collective>& collectives = rank.trace->collectives();
    const size_t first_call = entries[index].index;
    const Collective& first = collectives[first_call];
    const std::string& op = rank.trace->name(first.op);
    host_launches(rank, 1);
    if (op == "reduce_scatter") copies(rank, index, rank.trace->computing_stream());
    Item batch{.kind = Item::Kind::Batch, .num_calls = 1, .entry = index, .first_call = first_call};
    while (rank.next_entry < entries.size() && entries[rank.next_entry].kind == Entry::Kind::Collective &&
           collectives[entries[rank.next_entry].index].batch == first.batch) {
      ++rank.next_entry;
      ++batch.num_calls;
    }
    const int64_t own = -1 - first.communicator;
    queue(rank, first.stream, {.kind = Item::Kind::Reach, .point = begin_of_batch(first.batch)});
    queue(rank, own, {.kind = Item::Kind::Wait, .point = begin_of_batch(first.batch)});
    queue(rank, own, batch);
    queue(rank, own, {.kind = Item::Kind::Reach, .point = end_of_batch(first.batch)});
    if (op == "all_gather") rank.gathers[first.batch] = index;
  }

  void synchronize(Rank& rank, const Sync& sync) const {
    switch (sync.kind) {
      case Sync::Kind::Record:
        queue(rank, sync.stream, {.kind = Item::Kind::Reach, .point = point_of_event(sync.number)});
        break;
      case Sync::Kind::Wait:
        queue(rank, sync.stream, {.kind = Item::Kind::Wait, .point = point_of_event(sync.number)});
        break;
      case Sync::Kind::WaitCall: {
        if (sync.number == 0) break;
        queue(rank, sync.stream, {.kind = Item::Kind::Wait, .point = end_of_batch(sync.number)});
        const auto gather = rank.gathers.find(sync.number);
        if (gather == rank.gathers.end()) break;
        copies(rank, gather->second, sync.stream);
        rank.gathers.erase(gather);
        break;
      }
      case Sync::Kind::HostEvent:
        host_waits_for(rank, point_of_event(sync.number));
        break;
      case Sync::Kind::HostStream: {
        const Point point = own_point(rank.num_own_points++);
        queue(rank, sync.stream, {.kind = Item::Kind::Reach, .point = point});
        host_waits_for(rank, point);
        break;
      }
      case Sync::Kind::BeginGraph:
        rank.is_recording = true;
        break;
      case Sync::Kind::EndGraph:
        rank.is_recording = false;
        host_launches(rank, 1);
        break;
    }
  }

  static void host_waits_for(Rank& rank, Point point) {
    // A point that was never queued in these steps was reached before.
    if (rank.has_reached(point) || !rank.was_queued(point)) return;
    rank.host_waits = true;
    rank.host_awaits = point;
  }

  // ---- the device

  // Before a change of what runs on the rank: counts what it did until now.
  void touch(size_t r) {
    Rank& rank = ranks_[r];
    const double seconds = now_ - rank.updated;
    if (seconds > 0) {
      count(r, seconds);
      if (rank.working > 0) rank.worked += seconds;
      const double done = seconds * speed_of_work(rank);
      for (Stream& stream : rank.streams)
        if (is_working(stream)) {
          stream.remaining -= done;
          if (stream.remaining < rounding()) stream.remaining = 0;
        }
      rank.updated = now_;
    }
    rank.is_dirty = true;
  }

  static bool is_working(const Stream& stream) {
    return stream.is_running && stream.items.front().kind == Item::Kind::Work;
  }

  // Starts, passes and ends whatever can be now.
  void advance_streams(size_t r) {
    Rank& rank = ranks_[r];
    rank.is_dirty = false;
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t place = 0; place < rank.streams.size(); ++place)
        while (!rank.streams[place].items.empty() && advance(r, place)) changed = true;
      if (rank.host_waits && rank.has_reached(rank.host_awaits)) {
        rank.host_waits = false;
        rank.host_time = std::max(rank.host_time, now_);
        run_host(r);
        changed = true;
      }
    }
    rank.next = kNever;
    for (const Stream& stream : rank.streams) {
      if (stream.items.empty()) continue;
      if (stream.items.front().issued > now_)
        rank.next = std::min(rank.next, stream.items.front().issued);
      else if (is_working(stream))
        rank.next = std::min(rank.next, now_ + stream.remaining / speed_of_work(rank));
    }
  }

  // Returns whether the first item is over.
  bool advance(size_t r, size_t place) {
    Rank& rank = ranks_[r];
    Stream& stream = rank.streams[place];
    const Item item = stream.items.front();
    if (item.issued > now_) return false;
    switch (item.kind) {
      case Item::Kind::Reach:
        rank.reached[item.point] = true;
        break;
      case Item::Kind::Wait:
        if (rank.was_queued(item.point) && !rank.has_reached(item.point)) return false;
        break;
      case Item::Kind::EndOfStep:
        end_step(rank);
        break;
      case Item::Kind::Work:
        if (!stream.is_running) {
          begin(stream);
          stream.remaining = item.seconds;
          set_working(rank, rank.working + 1);
          return false;
        }
        if (stream.remaining > 0) return false;
        set_working(rank, rank.working - 1);
        end(r, rank.streams[place]);
        break;
      case Item::Kind::Copy:
        if (!stream.is_running) {
          begin(stream);
          stream.open_transfers = 1;
          start(item.seconds, links_of_copy(rank, item), {{r, place}});
          return false;
        }
        if (stream.open_transfers > 0) return false;
        end(r, stream);
        break;
      case Item::Kind::Batch:
        if (!stream.is_running) {
          begin(stream);
          stream.open_transfers = static_cast<size_t>(item.num_calls);
          for (size_t i = 0; i < stream.open_transfers; ++i)
            arrive({r, place}, rank.trace->collectives()[item.first_call + i]);
          return false;
        }
        if (stream.open_transfers > 0) return false;
        end(r, stream);
        break;
    }
    rank.streams[place].items.pop_front();
    return true;
  }

  static Links links_of_copy(const Rank& rank, const Item& item) {
    const Trace& trace = *rank.trace;
    const Launch& launch = trace.launches()[trace.entries()[item.entry].index];
    return trace.name(launch.name) == kCopyToHost ? Links::ToHost : Links::ToDevice;
  }

  void begin(Stream& stream) const {
    stream.is_running = true;
    stream.began = now_;
  }

  void end_step(Rank& rank) {
    if (rank.steps_ended == 2) return;
    rank.step_ends[rank.steps_ended++] = now_;
    const auto num_in = [&](int steps) {
      return std::ranges::count_if(ranks_, [&](const Rank& each) { return each.steps_ended >= steps; });
    };
    // The measurement begins and ends for all ranks at once.
    const auto all = static_cast<std::ptrdiff_t>(ranks_.size());
    if (!is_measuring_ && num_in(1) == all && num_in(2) < all) {
      for (size_t r = 0; r < ranks_.size(); ++r) touch(r);
      is_measuring_ = true;
    } else if (is_measuring_ && num_in(2) == all) {
      for (size_t r = 0; r < ranks_.size(); ++r) touch(r);
      is_measuring_ = false;
    }
  }

  void end(size_t r, Stream& stream) {
    stream.is_running = false;
    const Rank& rank = ranks_[r];
    if (!with_spans_ || rank.steps_ended != 1) return;
    const Item& item = stream.items.front();
    const Trace& trace = *rank.trace;
    const Entry& entry = trace.entries()[item.entry];
    Span span{.rank = static_cast<int>(r),
              .stream = stream.number,
              .begin = stream.began,
              .end = now_,
              .name = {},
              .module = {},
              .activity = item.kind == Item::Kind::Work ? item.activity : Activity::ExposedCommunication,
              .entry = item.entry};
    if (entry.kind == Entry::Kind::Launch) {
      const Launch& launch = trace.launches()[entry.index];
      span.name = trace.name(launch.name);
      span.module = trace.name(launch.module);
    } else {
      const Collective& call = trace.collectives()[entry.index];
      const std::string& label = trace.name(call.label);
      span.name = (item.kind == Item::Kind::Work ? "copies of " : "") + trace.name(call.op) +
                  (label.empty() ? "" : " ") + label;
      span.module = trace.name(call.module);
    }
    result_.spans.push_back(std::move(span));
  }

  // ---- transfers

  // The number that all ranks have for a group.
  int shared_communicator(Rank& rank, const Collective& call) {
    const auto found = rank.shared_communicators.find(call.communicator);
    if (found != rank.shared_communicators.end()) return found->second;
    const auto [entry, is_new] =
        communicators_.try_emplace({rank.trace->name(call.group), rank.trace->members(call.communicator)},
                                   static_cast<int>(communicators_.size()));
    return rank.shared_communicators[call.communicator] = entry->second;
  }

  void arrive(const Transfer::End& end, const Collective& call) {
    Rank& rank = ranks_[end.rank];
    const auto bytes = static_cast<double>(call.bytes);
    if (call.peer >= 0) {
      CostModel::Transfer cost = costs_.of_message(bytes, rank.world_rank, call.peer);
      const bool sends = rank.trace->name(call.op) == "send";
      if (sends) cost.seconds += late_seconds(end.rank);
      const size_t other = pipeline_rank_of(call.peer);
      // The peers of this pipeline rank do the same at the same time, so what is sent here is received there: it counts once.
      if (other == end.rank || other >= ranks_.size())
        return start(sends ? cost.seconds : 0, links_of(cost), {end});
      const int group = shared_communicator(rank, call);
      const int64_t sequence = rank.messages[{group, other, sends}]++;
      return meet({group, sends ? end.rank : other, sends ? other : end.rank, sequence}, 2, end, cost);
    }
    const std::vector<int>& members = rank.trace->members(call.communicator);
    CostModel::Transfer cost = costs_.of(rank.trace->name(call.op), bytes, members);
    cost.seconds += late_seconds(end.rank);
    // In ascending order.
    const size_t first = pipeline_rank_of(members.front()), last = pipeline_rank_of(members.back());
    if (first == last || ranks_.size() == 1) return start(cost.seconds, links_of(cost), {end});
    std::set<size_t> stages;
    for (const int member : members) stages.insert(pipeline_rank_of(member));
    // Members of other data-parallel positions stand for the simulated ones.
    const int group =
        communicators_
            .try_emplace({rank.trace->name(call.group), {}}, static_cast<int>(communicators_.size()))
            .first->second;
    meet({group, first, last, rank.calls[call.communicator]++}, stages.size(), end, cost);
  }

  // How much longer this rank's call takes, from now on its last one, because it comes late. Where the other side comes later still, nobody
  // waits for that.
  double late_seconds(size_t r) {
    if (costs_.cluster().host.late_share == 0) return 0;
    touch(r);
    return costs_.late_seconds(std::exchange(ranks_[r].worked, 0));
  }

  using MeetingKey = std::tuple<int, size_t, size_t, int64_t>;

  void meet(const MeetingKey& key, size_t needed, const Transfer::End& end, const CostModel::Transfer& cost) {
    std::vector<Transfer::End>& arrived = meetings_[key];
    arrived.push_back(end);
    if (arrived.size() < needed) return;
    start(cost.seconds, links_of(cost), std::move(arrived));
    meetings_.erase(key);
  }

  void start(double seconds, Links links, std::vector<Transfer::End> ends) {
    for (const Transfer::End& end : ends) {
      touch(end.rank);
      ++ranks_[end.rank].active[static_cast<size_t>(links)];
    }
    transfers_.push_back({.remaining = seconds, .links = links, .ends = std::move(ends), .updated = now_});
    set_speeds();
  }

  void end_transfers() {
    bool any = false;
    for (Transfer& transfer : transfers_) {
      if (transfer.end() > now_ + rounding()) continue;
      any = true;
      transfer.speed = 0;  // marks it
      for (const Transfer::End& end : transfer.ends) {
        touch(end.rank);
        --ranks_[end.rank].active[static_cast<size_t>(transfer.links)];
        --ranks_[end.rank].streams[end.stream].open_transfers;
      }
    }
    if (!any) return;
    std::erase_if(transfers_, [](const Transfer& transfer) { return transfer.speed == 0; });
    set_speeds();
  }

  // Transfers of a rank share its links.
  void set_speeds() {
    for (Transfer& transfer : transfers_) {
      int most = 1;
      for (const Transfer::End& end : transfer.ends)
        most = std::max(most, ranks_[end.rank].active[static_cast<size_t>(transfer.links)]);
      if (transfer.speed == 1.0 / most) continue;
      transfer.settle(now_);
      transfer.speed = 1.0 / most;
    }
  }

  // ---- time

  double speed_of_work(const Rank& rank) const {
    const double alone = costs_.cluster().device.alone;
    const double faster =
        alone == 1 ? 1 : std::min(alone, static_cast<double>(ranks_.size()) / std::max(num_computing_, 1));
    return faster / (rank.working * (rank.communicates() ? 1 + costs_.contention() : 1));
  }

  // Ranks that share cores become faster while others wait.
  void set_working(Rank& rank, int working) {
    const int change = (working > 0 ? 1 : 0) - (rank.working > 0 ? 1 : 0);
    if (change != 0 && costs_.cluster().device.alone != 1)
      for (size_t r = 0; r < ranks_.size(); ++r) touch(r);
    num_computing_ += change;
    rank.working = working;
  }

  void count(size_t r, double seconds) {
    if (!is_measuring_) return;
    const Rank& rank = ranks_[r];
    StepTime::OfRank& of_rank = result_.ranks[r];
    const Item* const work = work_of(rank);
    const Activity activity = work ? work->activity : why_it_waits(rank);
    of_rank.seconds[static_cast<size_t>(activity)] += seconds;
    if (activity == Activity::Compute && work->kernel == KernelKind::Product) of_rank.products += seconds;
    if (activity == Activity::Compute && work->kernel == KernelKind::Attention) of_rank.attention += seconds;
    if (rank.communicates()) of_rank.communicating += seconds;
  }

  const Item* work_of(const Rank& rank) const {
    if (rank.working == 0) return nullptr;
    for (const Stream& stream : rank.streams)
      if (is_working(stream)) return &stream.items.front();
    return nullptr;
  }

  Activity why_it_waits(const Rank& rank) const {
    // From the computation's stream to those that it waits for. This looks at the time before now, when items of this moment hadn't been issued.
    size_t place = 0;
    for (int depth = 0; depth < 100; ++depth) {
      const Stream& stream = rank.streams[place];
      if (stream.items.empty()) break;
      const Item& item = stream.items.front();
      if (item.issued >= now_) return Activity::Host;
      if (item.kind == Item::Kind::Copy) return Activity::ExposedCommunication;
      if (item.kind == Item::Kind::Batch)
        return rank.communicates() ? Activity::ExposedCommunication : Activity::Bubble;
      if (item.kind != Item::Kind::Wait || !rank.was_queued(item.point)) return Activity::Host;
      place = static_cast<size_t>(rank.stream_of_point[item.point]);
    }
    // Nothing is queued: its step is over, and another's isn't, or the host waits.
    return rank.steps_ended >= 2 ? Activity::Bubble : Activity::Host;
  }

  StepTime finished() {
    double ends[2] = {0, 0};
    for (const Rank& rank : ranks_) {
      if (rank.steps_ended < 2) throw Error(why_it_hangs());
      for (int step = 0; step < 2; ++step) ends[step] = std::max(ends[step], rank.step_ends[step]);
    }
    result_.begin = ends[0];
    result_.seconds = ends[1] - ends[0];
    return std::move(result_);
  }

  std::string why_it_hangs() const {
    std::string text = "the ranks of this plan wait for each other without end:";
    for (const Rank& rank : ranks_)
      for (const Stream& stream : rank.streams) {
        if (stream.items.empty() || stream.items.front().kind != Item::Kind::Batch) continue;
        const Collective& call = rank.trace->collectives()[stream.items.front().first_call];
        text += str("\n  rank ", rank.world_rank, ": ", rank.trace->name(call.op), " ",
                    rank.trace->name(call.label));
      }
    return text;
  }

  // Below it, a remainder of time is an error of arithmetic, which grows with the time that has passed.
  double rounding() const { return 1e-12 + 8 * std::numeric_limits<double>::epsilon() * now_; }

  const CostModel& costs_;
  int ranks_of_stage_;
  bool with_spans_;
  double now_ = 0;
  bool is_measuring_ = false;
  int num_computing_ = 0;  // ranks with kernels
  std::vector<Rank> ranks_;
  std::vector<Transfer> transfers_;
  std::map<std::pair<std::string, std::vector<int>>, int> communicators_;
  std::map<MeetingKey, std::vector<Transfer::End>> meetings_;
  StepTime result_;
};

}  // namespace

const char* name_of(Activity activity) {
  static constexpr std::array<const char*, kNumActivities> names = {
      "compute", "optimizer", "exposed_communication", "bubble", "host"};
  return names[static_cast<size_t>(activity)];
}

StepTime simulate(const std::vector<SimulatedRank>& ranks, int ranks_of_stage, const CostModel& costs,
                  bool with_spans) {
  return Simulation(ranks, ranks_of_stage, costs, with_spans).run();
}

}  // namespace titan::plan
