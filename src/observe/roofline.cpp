#include "observe/roofline.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <span>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "dist/stream.h"
#include "observe/metrics_format.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::train {

struct OperationCounter::State {
  /// A moment of the host, or of the current stream of a device.
  struct Moment {
    std::chrono::steady_clock::time_point host;
    dist::Event event;

    static Moment now(c10::Device device) {
      Moment moment{std::chrono::steady_clock::now(), {}};
      if (device.is_cpu()) return moment;
      // On the thread that reads data, too.
      if (dist::DeviceBackend* const devices = dist::device_backend()) devices->use_device_of_process();
      moment.event = dist::Event::timed();
      moment.event.record(dist::Stream::current(device));
      return moment;
    }
    double seconds_since(const Moment& earlier, c10::Device device) const {
      return device.is_cpu() ? std::chrono::duration<double>(host - earlier.host).count()
                             : event.seconds_since(earlier.event);
    }
  };

  /// An operation, or a wait for other ranks.
  struct Entry {
    std::string kind;
    OperationCost cost;
    Moment begin, end;
    bool is_wait = false;
    bool in_stream = true;  ///< that of the computation, not beside it
  };

  explicit State(c10::Device on) : device(on), stream(dist::Stream::current(on)), begin(Moment::now(on)) {}

  bool in_stream() const { return device.is_cpu() || dist::Stream::current(device) == stream; }
  bool counts_this_thread() const { return !device.is_cpu() || std::this_thread::get_id() == thread; }
  // Each operator's schema has a name of its own in memory, which lives as long as the operator.
  const Operation& operation(const at::RecordFunction& call) {
    const std::lock_guard lock(mutex);
    auto& known = operations[call.name()];
    if (!known) known = std::make_unique<Operation>(*call.operator_schema(), device.type());
    return *known;
  }
  void add(Entry entry) {
    const std::lock_guard lock(mutex);
    if (in_optimizer && !entry.is_wait && entry.cost.flops == 0) entry.kind = "optimizer";
    entries.push_back(std::move(entry));
  }

  const c10::Device device;
  const dist::Stream stream;
  const Moment begin;
  const std::thread::id thread = std::this_thread::get_id();
  std::mutex mutex;
  std::unordered_map<const char*, std::unique_ptr<Operation>> operations;
  std::vector<Entry> entries;
  bool in_optimizer = false;
};

namespace {

using State = OperationCounter::State;

/// LibTorch's callbacks are functions without an argument of ours.
struct Current {
  std::mutex mutex;
  std::shared_ptr<State> state;

  static Current& get() {
    static Current current;
    return current;
  }
  static std::shared_ptr<State> counting_here() {
    const std::lock_guard lock(get().mutex);
    const auto& state = get().state;
    return state && state->counts_this_thread() ? state : nullptr;
  }
  void set(std::shared_ptr<State> now) {
    const std::lock_guard lock(mutex);
    state = std::move(now);
  }
};

/// An operation or a wait in progress. Operations of a thread end in the reverse order of their beginnings.
struct OpenEntry final : at::ObserverContext {
  std::shared_ptr<State> state;
  State::Entry entry;
  const Operation* operation = nullptr;
  bool on_device = false, counted_inside = false;
  OpenEntry* outer = nullptr;
};

thread_local OpenEntry* innermost = nullptr;

bool has_tensor_on(c10::Device device, std::span<const c10::IValue> values) {
  return std::any_of(values.begin(), values.end(), [&](const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() && value.toTensor().device() == device;
    if (!value.isTensorList()) return false;
    const auto tensors = value.toTensorVector();
    return !tensors.empty() && tensors.front().device() == device;
  });
}

std::unique_ptr<at::ObserverContext> begin_operation(const at::RecordFunction& function) {
  if (innermost && innermost->operation->is_whole()) return nullptr;
  auto state = Current::counting_here();
  if (!state || !function.operator_name()) return nullptr;
  const Operation& operation = state->operation(function);
  if (!operation.counts()) return nullptr;
  auto open = std::make_unique<OpenEntry>();
  open->operation = &operation;
  open->entry.kind = operation.kind();
  open->entry.cost = operation.of_inputs(function.inputs());
  open->on_device = has_tensor_on(state->device, function.inputs());
  open->entry.begin = State::Moment::now(state->device);
  open->state = std::move(state);
  open->outer = std::exchange(innermost, open.get());
  return open;
}

void end_operation(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!context) return;
  auto& [state, entry, operation, on_device, counted_inside, outer] = static_cast<OpenEntry&>(*context);
  innermost = outer;
  bool counts = operation->is_whole() || !counted_inside;
  if (counts) entry.end = State::Moment::now(state->device);
  operation->add_outputs(function.outputs(), entry.cost);
  counts = counts && entry.cost.bytes_read + entry.cost.bytes_written > 0 &&
           (on_device || has_tensor_on(state->device, function.outputs()));
  if (innermost) innermost->counted_inside |= counts || counted_inside;
  entry.in_stream = state->in_stream();
  if (counts) state->add(std::move(entry));
}

// A range of dist::PeerWait.
std::unique_ptr<at::ObserverContext> begin_wait(const at::RecordFunction& range) {
  constexpr std::string_view prefix = "peer wait ";
  const std::string_view name = range.name();
  if (!name.starts_with(prefix) || dist::BackgroundCalls::active()) return nullptr;
  auto state = Current::counting_here();
  if (!state || !state->in_stream()) return nullptr;
  auto open = std::make_unique<OpenEntry>();
  open->entry.kind = name.substr(prefix.size());
  open->entry.is_wait = true;
  open->entry.begin = State::Moment::now(state->device);
  open->state = std::move(state);
  return open;
}

void end_wait(const at::RecordFunction& /*range*/, at::ObserverContext* context) {
  if (!context) return;
  auto& open = static_cast<OpenEntry&>(*context);
  open.entry.end = State::Moment::now(open.state->device);
  open.state->add(std::move(open.entry));
}

}  // namespace

OperationCounter::OperationCounter(c10::Device device) : state_(std::make_shared<State>(device)) {
  Current::get().set(state_);
  operations_handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begin_operation, end_operation)
                                                 .needsInputs(true)
                                                 .needsOutputs(true)
                                                 .scopes({at::RecordScope::FUNCTION}));
  waits_handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(begin_wait, end_wait).scopes({at::RecordScope::USER_SCOPE}));
}

OperationCounter::~OperationCounter() { stop(); }

void OperationCounter::stop() {
  if (!operations_handle_) return;
  at::removeCallback(std::exchange(operations_handle_, 0));
  at::removeCallback(std::exchange(waits_handle_, 0));
  Current::get().set(nullptr);
}

void OperationCounter::begin_optimizer() {
  const std::lock_guard lock(state_->mutex);
  state_->in_optimizer = true;
}

CountedOperations OperationCounter::finish() {
  const c10::Device device = state_->device;
  const State::Moment end = State::Moment::now(device);
  stop();
  if (!device.is_cpu()) at::detail::getCUDAHooks().deviceSynchronize(device.index());
  const std::lock_guard lock(state_->mutex);
  CountedOperations counted;
  counted.span_s = counted.idle_s = end.seconds_since(state_->begin, device);
  std::map<std::pair<std::string, at::ScalarType>, OperationTotals> totals;
  for (const State::Entry& entry : state_->entries) {
    const double seconds = entry.end.seconds_since(entry.begin, device);
    if (entry.in_stream) counted.idle_s -= seconds;
    if (entry.is_wait) {
      counted.exposed_s[entry.kind] += seconds;
      continue;
    }
    OperationTotals& total = totals[{entry.kind, entry.cost.dtype}];
    total.kind = entry.kind;
    ++total.calls;
    total.cost.dtype = entry.cost.dtype;
    total.cost.flops += entry.cost.flops;
    total.cost.bytes_read += entry.cost.bytes_read;
    total.cost.bytes_written += entry.cost.bytes_written;
    total.seconds += seconds;
  }
  counted.idle_s = std::max(0.0, counted.idle_s);
  for (const auto& [key, total] : totals) counted.operations.push_back(total);
  return counted;
}

// ---- limits of a CPU

namespace {

// The shortest of a few calls, after one that warms up.
template <class Action>
double shortest(const Action& action) {
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    action();
    const double time = seconds_since(start);
    if (i == 1 || (i > 1 && time < best)) best = time;
  }
  return best;
}

DeviceLimits measured_limits(const std::vector<OperationTotals>& operations) {
  constexpr int64_t kSize = 1024, kCopied = 64 << 20;
  DeviceLimits limits;
  limits.source = str("measured: products of ", kSize, " x ", kSize, ", copies of ", size_text(kCopied), ", ",
                      at::get_num_threads(), " thread(s)");
  const at::Tensor from = at::ones({kCopied}, at::kByte);
  at::Tensor to = at::ones({kCopied}, at::kByte);
  limits.bytes_per_s = 2.0 * kCopied / shortest([&] { to.copy_(from); });
  for (const OperationTotals& total : operations) {
    const at::ScalarType dtype = total.cost.dtype;
    if (total.cost.flops == 0 || c10::elementSize(dtype) < 2 || limits.flops.contains(dtype)) continue;
    const at::Tensor factor = at::ones({kSize, kSize}, dtype);
    at::Tensor product = at::ones({kSize, kSize}, dtype);
    limits.flops[dtype] =
        2.0 * kSize * kSize * kSize / shortest([&] { at::mm_out(product, factor, factor); });
  }
  return limits;
}

// ---- collectives

struct CollectiveTotals {
  int64_t calls = 0;
  double bytes = 0, seconds = 0;
};

struct Collectives {
  std::map<std::string, CollectiveTotals> by_kind;
  int64_t lost = 0;  // calls that have left the recorder's ring
};

// The device is done with its calls, but another thread may be about to say so.
dist::CallRecord settled(dist::FlightRecorder& recorder, uint64_t number, dist::CallRecord call) {
  for (int i = 0; i < 1000 && !dist::has_ended(call.state); ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    recorder.sweep();
    if (!recorder.read(number, call)) break;
  }
  return call;
}

// With a device, calls of its group have the device's time. Others go between the hosts.
Collectives collectives_since(dist::FlightRecorder& recorder, uint64_t first, c10::Device device) {
  Collectives found;
  const uint64_t end = recorder.num_calls();
  for (uint64_t number = first; number < end; ++number) {
    dist::CallRecord call;
    if (!recorder.read(number, call)) {
      ++found.lost;
      continue;
    }
    if (call.background) continue;
    call = settled(recorder, number, call);
    const bool on_host = !device.is_cpu() && call.device_ns == 0;
    const int64_t ns =
        call.device_ns > 0 ? call.device_ns : std::max<int64_t>(0, call.end_ns - call.start_ns);
    CollectiveTotals& total = found.by_kind[str(name_of(call.op), on_host ? " (hosts)" : "")];
    ++total.calls;
    total.bytes += static_cast<double>(call.bytes);
    total.seconds += 1e-9 * static_cast<double>(ns);
  }
  return found;
}

// ---- the report

using nlohmann::json;

std::string dtype_name(at::ScalarType dtype) {
  std::string name = c10::toString(dtype);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name == "float" ? "float32" : name == "double" ? "float64" : name == "half" ? "float16" : name;
}

/// A share of a limit; null where the limit is unknown.
json share_of(double amount, double seconds, double limit) {
  return limit > 0 && seconds > 0 ? json(amount / seconds / limit) : json();
}

json row_of(const OperationTotals& total, const DeviceLimits& limits) {
  const OperationCost& cost = total.cost;
  const double bytes = cost.bytes_read + cost.bytes_written;
  const auto peak = limits.flops.find(cost.dtype);
  const json of_flops = cost.flops > 0 && peak != limits.flops.end()
                            ? share_of(cost.flops, total.seconds, peak->second)
                            : json();
  const json of_bytes = share_of(bytes, total.seconds, limits.bytes_per_s);
  // Without the peak of a product's dtype, the nearer limit is unknown.
  const bool is_known = cost.flops == 0 || !of_flops.is_null();
  const bool by_flops = is_known && !of_flops.is_null() && (of_bytes.is_null() || of_flops > of_bytes);
  const json nearer = by_flops ? of_flops : is_known ? of_bytes : json();
  return {{"kind", total.kind},
          {"dtype", cost.flops > 0 ? json(dtype_name(cost.dtype)) : json()},
          {"calls", total.calls},
          {"flops", cost.flops},
          {"bytes_read", cost.bytes_read},
          {"bytes_written", cost.bytes_written},
          {"seconds", total.seconds},
          {"share_of_peak_flops", of_flops},
          {"share_of_bandwidth", of_bytes},
          {"share_of_limit", nearer},
          {"limit", nearer.is_null() ? json() : json(by_flops ? "flops" : "bandwidth")}};
}

constexpr const char* kPeerMemory = "peer memory";  // the name of its PeerWaits

json rows_of(const Collectives& collectives, const std::map<std::string, double>& exposed_s) {
  std::map<std::string, CollectiveTotals> kinds = collectives.by_kind;
  for (const auto& [what, seconds] : exposed_s)
    if (seconds > 0 && what == kPeerMemory) kinds[what];  // has no calls
  json rows = json::array();
  for (const auto& [kind, total] : kinds) {
    const auto waited = exposed_s.find(kind);
    const double exposed = waited == exposed_s.end() ? 0 : waited->second;
    rows.push_back({{"kind", kind},
                    {"calls", total.calls},
                    {"bytes", total.bytes},
                    {"seconds", total.seconds},
                    {"exposed_s", exposed},
                    {"hidden_s", std::max(0.0, total.seconds - exposed)}});
  }
  return rows;
}

std::string milliseconds(double seconds) { return formatted("%.3f", 1e3 * seconds); }
std::string percent(double share) { return formatted("%.1f%%", 100 * share); }
std::string percent(const json& share) { return share.is_null() ? "-" : percent(share.get<double>()); }
std::string giga(double amount) {
  return amount > 0 ? formatted(amount < 1e12 ? "%.4g" : "%.0f", 1e-9 * amount) : "-";
}
std::string size_of(double bytes) { return size_text(static_cast<int64_t>(bytes)); }
double rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

std::string operations_text(const json& report) {
  const double step_s = report.at("step_s");
  TextTable table;
  table.right = {false, true, true, true, true, true, true, true, true, true, false};
  table.rows.push_back({"operation", "calls", "read", "written", "GFLOP", "ms", "of step", "GFLOP/s", "GB/s",
                        "of limit", "limit"});
  for (const json& row : report.at("operations")) {
    const double flops = row.at("flops"), seconds = row.at("seconds");
    const double read = row.at("bytes_read"), written = row.at("bytes_written");
    const std::string dtype = row.at("dtype").is_null() ? "" : " " + row.at("dtype").get<std::string>();
    table.rows.push_back({row.at("kind").get<std::string>() + dtype, str(row.at("calls").get<int64_t>()),
                          size_of(read), size_of(written), giga(flops), milliseconds(seconds),
                          percent(rate(seconds, step_s)), giga(rate(flops, seconds)),
                          giga(rate(read + written, seconds)), percent(row.at("share_of_limit")),
                          row.at("limit").is_null() ? "unknown" : row.at("limit").get<std::string>()});
  }
  const double idle = report.at("idle_s");
  table.rows.push_back({"in no operation", "", "", "", "", milliseconds(idle), percent(rate(idle, step_s))});
  return to_string(table);
}

std::string collectives_text(const json& report) {
  if (report.at("collectives").empty()) return "";
  const double step_s = report.at("step_s");
  TextTable table;
  table.right = {false, true, true, true, true, true, true, true};
  table.rows.push_back({"collective", "calls", "bytes", "ms", "hidden ms", "exposed ms", "of step", "GB/s"});
  for (const json& row : report.at("collectives")) {
    const double bytes = row.at("bytes"), seconds = row.at("seconds"), exposed = row.at("exposed_s");
    table.rows.push_back({row.at("kind").get<std::string>(), str(row.at("calls").get<int64_t>()),
                          size_of(bytes), milliseconds(seconds), milliseconds(row.at("hidden_s")),
                          milliseconds(exposed), percent(rate(exposed, step_s)), giga(rate(bytes, seconds))});
  }
  return "\n" + to_string(table);
}

std::string limits_text(const json& limits) {
  std::string text;
  for (const auto& [dtype, flops] : limits.at("flops_per_s").items())
    text += str(text.empty() ? "" : ", ", giga(flops), " GFLOP/s in ", dtype);
  if (const double bandwidth = limits.at("bytes_per_s"); bandwidth > 0)
    text += str(text.empty() ? "" : ", ", giga(bandwidth), " GB/s of memory");
  return text.empty() ? "unknown" : str(text, " (", limits.at("source").get<std::string>(), ")");
}

}  // namespace

RooflineReport::RooflineReport(const dist::World& world, Options options)
    : world_(world), options_(std::move(options)) {}

RooflineReport::~RooflineReport() = default;

void RooflineReport::begin(Phase phase, int64_t /*step*/) {
  if (phase == Phase::Step && ++steps_ > kWarmUpSteps && !reported_) {
    first_call_ = world_.recorder().num_calls();
    counter_ = std::make_unique<OperationCounter>(world_.device());
  }
  if (phase == Phase::Optimizer && counter_) counter_->begin_optimizer();
}

// Runs at the end of a phase, where nothing may be thrown. A step without an optimizer (it has no labels)
// isn't one to measure: the next one is.
void RooflineReport::end(Phase phase, int64_t step, bool failed) {
  if (!counter_) return;
  if (failed || phase == Phase::Step) return counter_.reset();
  if (phase != Phase::Optimizer) return;
  try {
    report(step);
  } catch (const std::exception& error) {
    log::error(str("the roofline report of step ", step, " failed: ", error.what()));
  }
  counter_.reset();
}

void RooflineReport::report(int64_t step) {
  reported_ = true;
  const c10::Device device = world_.device();
  const CountedOperations counted = counter_->finish();
  const Collectives collectives = collectives_since(world_.recorder(), first_call_, device);
  // All ranks of a host measure at the same time, as they compute at the same time.
  const bool measures = device.is_cpu() && options_.limits.source.empty();
  const DeviceLimits limits = measures ? measured_limits(counted.operations) : options_.limits;
  if (!options_.folder) return;
  // FSDP marks its waits on one rank, too, which has no collectives to wait for.
  double idle_s = counted.idle_s;
  for (const auto& [what, seconds] : counted.exposed_s)
    if (what != kPeerMemory && !collectives.by_kind.contains(what)) idle_s += seconds;
  json report = {{"step", step},
                 {"rank", world_.rank()},
                 {"world_size", world_.size()},
                 {"clock", device.is_cpu() ? "host" : "device"},
                 {"step_s", counted.span_s},
                 {"idle_s", idle_s},
                 {"lost_calls", collectives.lost},
                 {"operations", json::array()},
                 {"collectives", rows_of(collectives, counted.exposed_s)}};
  report["limits"] = {
      {"source", limits.source}, {"bytes_per_s", limits.bytes_per_s}, {"flops_per_s", json::object()}};
  for (const auto& [dtype, flops] : limits.flops) report["limits"]["flops_per_s"][dtype_name(dtype)] = flops;
  for (const OperationTotals& total : counted.operations)
    report["operations"].push_back(row_of(total, limits));
  const std::filesystem::path file = *options_.folder / "roofline.json";
  make_folder(*options_.folder);
  write_file_atomic(file, report.dump(1) + "\n");
  if (collectives.lost > 0)
    log::warning(str("the roofline report lacks ", collectives.lost,
                     " collectives that the flight recorder no longer had; set comm.trace_buf_size higher"));
  log::info_rank0(str("roofline of step ", step, " on rank ", world_.rank(), ": ",
                      milliseconds(counted.span_s), " ms by the ",
                      device.is_cpu() ? "host's clock" : "device's events",
                      "; limits: ", limits_text(report["limits"]), "\n", operations_text(report),
                      collectives_text(report), "written to ", file.string()));
}

void RooflineReport::flush() {
  if (!reported_)
    log::warning_rank0(str("no roofline report: it needs ", kWarmUpSteps + 1,
                           " steps with labels after the start, and there were fewer"));
}

}  // namespace titan::train
