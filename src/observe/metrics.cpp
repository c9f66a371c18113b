#include "titan/observe/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <ctime>

#include "core/hash.h"
#include "core/process.h"
#include "observe/metrics_format.h"
#include "observe/structured_log.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

// TorchTitan's colors.
struct Palette {
  const char* red = "\033[31m";
  const char* green = "\033[32m";
  const char* yellow = "\033[33m";
  const char* blue = "\033[34m";
  const char* magenta = "\033[35m";
  const char* cyan = "\033[36m";
  const char* orange = "\033[38;2;180;60;0m";
  const char* turquoise = "\033[38;2;54;234;195m";
  const char* reset = "\033[39m";
};
constexpr Palette kColor;
constexpr Palette kPlain{"", "", "", "", "", "", "", "", ""};

// 1234567.891 with 2 decimals -> "1,234,567.89"
std::string with_commas(double value, int decimals) {
  std::string text = formatted("%.*f", decimals, value);
  size_t end = text.find('.');
  if (end == std::string::npos) end = text.size();
  size_t first_digit = text[0] == '-' ? 1 : 0;
  for (size_t at = end; at > first_digit + 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

std::string memory_field(double gib, double percent) {
  return formatted("memory: %5.2fGiB(%.2f%%)", gib, percent);
}

std::string mfu_field(const std::optional<double>& mfu) {
  return mfu ? formatted("mfu: %.2f%%", *mfu) : "mfu: N/A";
}

std::string of_plan_field(const std::optional<double>& percent) {
  return percent ? formatted("  of plan: %.1f%%", *percent) : "";
}

// Builds {"a": 1, "b": 2.5}. NaN and infinities, which JSON lacks, become null.
class JsonObject {
 public:
  JsonObject& add(const char* key, double value) {
    char digits[32];
    auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    return put(key, std::isfinite(value) ? std::string(digits, end) : "null");
  }
  JsonObject& add(const char* key, int64_t value) { return put(key, std::to_string(value)); }
  JsonObject& add(const char* key, const std::optional<double>& value) {
    return value ? add(key, *value) : put(key, "null");
  }
  std::string text() const { return text_ + "}"; }

 private:
  JsonObject& put(const char* key, const std::string& value) {
    text_ += str(text_.size() > 1 ? ", " : "", '"', key, "\": ", value);
    return *this;
  }
  std::string text_ = "{";
};

}  // namespace

std::string console_line(const StepMetrics& m, bool color) {
  const Palette& c = color ? kColor : kPlain;
  return str(c.red, formatted("step: %2lld", static_cast<long long>(m.step)), "  ",  //
             c.green, formatted("loss: %8.5f", m.loss), "  ",                        //
             c.orange, formatted("grad_norm: %7.4f", m.grad_norm), "  ",             //
             c.turquoise, memory_field(m.memory_gib, m.memory_percent), "  ",        //
             c.blue, "tps: ", with_commas(std::round(m.tps), 0), "  ",               //
             c.cyan, "tflops: ", with_commas(m.tflops, 2), "  ",                     //
             c.magenta, mfu_field(m.mfu), of_plan_field(m.percent_of_plan), c.reset);
}

std::string console_line(const ValidationMetrics& m, bool color) {
  const Palette& c = color ? kColor : kPlain;
  return str(c.yellow, formatted("validate step: %2lld", static_cast<long long>(m.step)), "  ",  //
             c.green, formatted("loss: %7.4f", m.loss), "  ",                                    //
             c.turquoise, memory_field(m.memory_gib, m.memory_percent), "  ",                    //
             c.blue, "tps: ", with_commas(std::round(m.tps), 0), c.reset);
}

std::string json_line(const StepMetrics& m) {
  JsonObject object;
  object.add("step", m.step).add("loss", m.loss).add("max_loss", m.max_loss).add("grad_norm", m.grad_norm);
  object.add("lr", m.lr).add("tps", m.tps).add("tflops", m.tflops).add("mfu", m.mfu);
  if (m.percent_of_plan) object.add("percent_of_plan", m.percent_of_plan);
  object.add("memory_gib", m.memory_gib).add("memory_percent", m.memory_percent);
  if (m.allocated_gib) object.add("allocated_gib", *m.allocated_gib);
  if (m.active_gib) object.add("active_gib", m.active_gib).add("active_percent", m.active_percent);
  if (m.alloc_retries) object.add("alloc_retries", *m.alloc_retries).add("num_ooms", m.num_ooms.value_or(0));
  object.add("data_loading_s", m.data_loading_s).add("step_s", m.step_s);
  object.add("n_tokens_seen", m.n_tokens_seen);
  if (m.skipped_steps) object.add("skipped_steps", *m.skipped_steps);
  if (m.checkpoint_s) object.add("checkpoint_s", m.checkpoint_s);
  if (m.startup_s) object.add("startup_s", m.startup_s);
  return object.text();
}

std::string json_line(const ValidationMetrics& m) {
  JsonObject object;
  object.add("step", m.step).add("loss", m.loss).add("tps", m.tps);
  object.add("memory_gib", m.memory_gib).add("memory_percent", m.memory_percent);
  return object.text();
}

std::string progress(int64_t step, int64_t total_steps, double seconds_left) {
  auto left = static_cast<long long>(seconds_left + 0.5);
  return formatted("  %3lld%% %lld:%02lld:%02lld left", static_cast<long long>(100 * step / total_steps),
                   left / 3600, left / 60 % 60, left % 60);
}

std::optional<double> RemainingTime::seconds_left(int64_t step, double now_s) {
  if (first_step_ < 0) {
    first_step_ = step;
    first_s_ = now_s;
    return std::nullopt;
  }
  const double step_s = (now_s - first_s_) / static_cast<double>(std::max<int64_t>(1, step - first_step_));
  return step_s * static_cast<double>(total_steps_ - step);
}

// ---- event files

namespace {

// Protobuf's wire format, as far as an Event with scalars needs it:
// https://protobuf.dev/programming-guides/encoding/
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_tag(std::string& out, uint32_t field, WireType type) { put_varint(out, field << 3 | type); }

// Both formats are little-endian, as every machine that LibTorch runs on.
template <class T>
void put_raw(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void put_bytes(std::string& out, uint32_t field, const std::string& bytes) {
  put_tag(out, field, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
std::string event_head() {
  std::string event;
  put_tag(event, 1, kFixed64);
  put_raw(event, now_s());
  return event;
}

// Summary.Value { string tag = 1; float simple_value = 2; }
std::string summary_value(const std::string& tag, double value) {
  std::string message;
  put_bytes(message, 1, tag);
  put_tag(message, 2, kFixed32);
  put_raw(message, static_cast<float>(value));
  return message;
}

// TFRecord's masking, so that a checksum of data that itself contains checksums stays strong.
uint32_t masked_crc(std::string_view bytes) {
  uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

std::filesystem::path new_event_file(const std::filesystem::path& folder) {
  // The name that TensorBoard looks for: "tfevents", a time, a host. The process id distinguishes two runs
  // that start in the same second.
  return folder /
         str("events.out.tfevents.", static_cast<int64_t>(now_s()), ".", host_name(), ".", ::getpid());
}

}  // namespace

EventFileWriter::EventFileWriter(const std::filesystem::path& folder)
    : file_(new_event_file(folder), /*truncate=*/false) {
  std::string version = event_head();
  put_bytes(version, 3, "brain.Event:2");
  append_record(version);
}

void EventFileWriter::write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
  std::string event = event_head();
  put_tag(event, 2, kVarint);
  put_varint(event, static_cast<uint64_t>(step));
  std::string summary;
  for (const auto& [tag, value] : scalars) put_bytes(summary, 1, summary_value(tag, value));
  put_bytes(event, 5, summary);
  append_record(event);
}

void EventFileWriter::append_record(const std::string& event) {
  std::string length;
  put_raw(length, static_cast<uint64_t>(event.size()));
  std::string record = length;
  put_raw(record, masked_crc(length));
  record += event;
  put_raw(record, masked_crc(event));
  file_.append(record);
}

// ---- sinks

namespace {

class ConsoleSink final : public MetricsSink {
 public:
  explicit ConsoleSink(const MetricsSinkOptions& options)
      : total_steps_(options.total_steps),
        on_terminal_(options.on_terminal),
        color_(options.on_terminal && !options.settings.disable_color_printing),
        remaining_(options.total_steps) {}

  void log(const StepMetrics& m) override {
    log::info_rank0(console_line(m, color_) + progress_text(m.step));
  }
  void log(const ValidationMetrics& m) override { log::info_rank0(console_line(m, color_)); }

 private:
  std::string progress_text(int64_t step) {
    if (!on_terminal_ || total_steps_ <= 0) return "";
    const auto left = remaining_.seconds_left(step, 1e-9 * static_cast<double>(steady_now_ns()));
    return left ? progress(step, total_steps_, *left) : "";
  }

  int64_t total_steps_;
  bool on_terminal_, color_;
  RemainingTime remaining_;
};

class JsonlSink final : public MetricsSink {
 public:
  explicit JsonlSink(const MetricsSinkOptions& options)
      : steps_path_(options.folder / "metrics.jsonl"),
        validations_path_(options.folder / "validation.jsonl") {}

  void begin_after(int64_t step) override {
    if (step == 0 && !steps_) keep_earlier_run();
    for (const auto& path : {steps_path_, validations_path_}) {
      const int64_t num_broken = step > 0 ? keep_rows_up_to(step, path) : 0;
      if (num_broken > 0)
        log::warning_rank0(
            str(path.string(), ": removed ", num_broken, " incomplete row(s), as a killed run leaves them"));
    }
    steps_ = std::make_unique<AppendFile>(steps_path_, /*truncate=*/step == 0);
    if (step > 0 && std::filesystem::exists(validations_path_))
      validations_ = std::make_unique<AppendFile>(validations_path_, /*truncate=*/false);
  }
  void log(const StepMetrics& m) override { steps_->append(json_line(m) + "\n"); }
  void log(const ValidationMetrics& m) override {
    // A run that never validates leaves no empty file.
    if (!validations_) validations_ = std::make_unique<AppendFile>(validations_path_, /*truncate=*/true);
    validations_->append(json_line(m) + "\n");
  }
  void flush() override {
    for (AppendFile* file : {steps_.get(), validations_.get()})
      if (file) file->sync();
  }

 private:
  // A run from the start in the folder of an earlier one: metrics.jsonl becomes metrics.1.jsonl.
  void keep_earlier_run() const {
    const auto has_rows = [](const std::filesystem::path& path) {
      std::error_code error;
      return std::filesystem::file_size(path, error) > 0 && !error;
    };
    if (!has_rows(steps_path_) && !has_rows(validations_path_)) return;
    const auto kept = [](std::filesystem::path path, int number) {
      return path.replace_extension(str(number, ".jsonl"));
    };
    int number = 1;
    while (std::filesystem::exists(kept(steps_path_, number)) ||
           std::filesystem::exists(kept(validations_path_, number)))
      ++number;
    for (const auto& path : {steps_path_, validations_path_}) {
      if (!has_rows(path)) continue;
      std::error_code error;
      std::filesystem::rename(path, kept(path, number), error);
      TITAN_CHECK(!error, "cannot rename ", path.string(), ": ", error.message());
    }
    log::info_rank0(
        str("the metrics of an earlier run in this folder are kept: ", kept(steps_path_, number).string()));
  }

  std::filesystem::path steps_path_, validations_path_;
  std::unique_ptr<AppendFile> steps_, validations_;
};

/// TorchTitan's tags.
class TensorBoardSink final : public MetricsSink {
 public:
  explicit TensorBoardSink(const MetricsSinkOptions& options)
      : folder_(options.folder / options.settings.save_tb_folder) {}

  void begin_after(int64_t /*step*/) override { events_ = std::make_unique<EventFileWriter>(fresh_folder()); }

  void log(const StepMetrics& m) override {
    Scalars scalars = {{"loss_metrics/global_avg_loss", m.loss},
                       {"loss_metrics/global_max_loss", m.max_loss},
                       {"grad_norm", m.grad_norm},
                       {"throughput(tps)", m.tps},
                       {"tflops", m.tflops},
                       {"time_metrics/end_to_end(s)", m.step_s},
                       {"time_metrics/data_loading(s)", m.data_loading_s},
                       {"time_metrics/data_loading(%)", m.step_s > 0 ? 100 * m.data_loading_s / m.step_s : 0},
                       {"memory/max_reserved(GiB)", m.memory_gib},
                       {"memory/max_reserved(%)", m.memory_percent},
                       {"n_tokens_seen", static_cast<double>(m.n_tokens_seen)},
                       {"lr", m.lr}};
    // An unknown value has no tag, because a zero would mislead.
    const auto add_if_known = [&](const char* tag, const auto& value) {
      if (value) scalars.emplace_back(tag, static_cast<double>(*value));
    };
    add_if_known("mfu(%)", m.mfu);
    add_if_known("of_plan(%)", m.percent_of_plan);
    add_if_known("memory/max_allocated(GiB)", m.allocated_gib);
    add_if_known("memory/max_active(GiB)", m.active_gib);
    add_if_known("memory/max_active(%)", m.active_percent);
    add_if_known("memory/num_alloc_retries", m.alloc_retries);
    add_if_known("memory/num_ooms", m.num_ooms);
    add_if_known("skipped_steps", m.skipped_steps);
    add_if_known("time_metrics/checkpoint(s)", m.checkpoint_s);
    events_->write(m.step, scalars);
  }

  void log(const ValidationMetrics& m) override {
    events_->write(m.step, {{"validation_metrics/loss", m.loss},
                            {"validation_metrics/throughput(tps)", m.tps},
                            {"validation_metrics/memory/max_reserved(GiB)", m.memory_gib},
                            {"validation_metrics/memory/max_reserved(%)", m.memory_percent}});
  }

  void flush() override {
    if (events_) events_->sync();
  }

 private:
  using Scalars = std::vector<std::pair<std::string, double>>;

  // Named by the minute. Every start and every rewind has a separate folder, so that TensorBoard shows
  // repeated steps side by side.
  std::filesystem::path fresh_folder() const {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    ::localtime_r(&now, &local);
    char name[32];
    std::strftime(name, sizeof name, "%Y%m%d-%H%M", &local);
    std::filesystem::path folder = folder_ / name;
    for (int number = 2; std::filesystem::exists(folder); ++number) folder = folder_ / str(name, "-", number);
    return folder;
  }

  std::filesystem::path folder_;
  std::unique_ptr<EventFileWriter> events_;
};

template <class Sink>
std::unique_ptr<MetricsSink> make_sink(const MetricsSinkOptions& options) {
  return std::make_unique<Sink>(options);
}

}  // namespace

void describe(config::Table<MetricsSettings>& table) {
  table.field("log_freq", &MetricsSettings::log_freq,
              "steps from one logged step to the next; step 1 is always logged", config::at_least(1));
  table.field("sinks", &MetricsSettings::sinks,
              "where metrics go: console, jsonl, tensorboard, or a registered sink (docs/extending.md)");
  table.field("enable_tensorboard", &MetricsSettings::enable_tensorboard, "write TensorBoard event files");
  table.refused("enable_wandb", false,
                "Weights & Biases needs its Python package: scripts/wandb_offline.py makes an offline run of "
                "metrics.jsonl");
  table.field("disable_color_printing", &MetricsSettings::disable_color_printing,
              "no colors on the terminal");
  table.field("save_tb_folder", &MetricsSettings::save_tb_folder,
              "folder of the event files, under job.dump_folder");
  table.field("save_for_all_ranks", &MetricsSettings::save_for_all_ranks,
              "every rank writes metrics, not only rank 0: rank r into rank_<r> under job.dump_folder");
  table.field("peak_flops", &MetricsSettings::peak_flops,
              "peak FLOP/s of one device, for mfu; unset: by the GPU's name, unknown for CPUs",
              config::at_least(1));
  table.field("plan_device", &MetricsSettings::plan_device,
              "the device for which rank 0 plans the run beside it, as plan.json under job.dump_folder: auto "
              "(on GPUs, by the "
              "GPU's name), a device of titan plan --device or a .toml file, or none (docs/plan.md)");
  table.field(
      "report_roofline", &MetricsSettings::report_roofline,
      "measure the fourth step: per kind of operation its bytes, FLOPs, time and share of the device's "
      "limits, and the exposed part of collectives; as a table in the log and as roofline.json under "
      "job.dump_folder (titan train --report-roofline)");
}

Registry<MakeMetricsSink>& metrics_sinks() {
  static Registry<MakeMetricsSink>& sinks = *[] {
    auto* built_in = new Registry<MakeMetricsSink>("metrics sink");
    built_in->add("console", make_sink<ConsoleSink>);
    built_in->add("jsonl", make_sink<JsonlSink>);
    built_in->add("tensorboard", make_sink<TensorBoardSink>);
    return built_in;
  }();
  return sinks;
}

MetricsLogger::MetricsLogger(const MetricsSinkOptions& options) {
  config::StringList names = options.settings.sinks;
  if (options.settings.enable_tensorboard) names.insert(names.begin(), "tensorboard");
  for (auto name = names.begin(); name != names.end(); ++name)
    if (std::find(names.begin(), name, *name) == name) sinks_.push_back(metrics_sinks().get(*name)(options));
}

void MetricsLogger::begin_after(int64_t step) {
  begun_ = true;
  for (const auto& sink : sinks_) sink->begin_after(step);
}

void MetricsLogger::logged(const StepMetrics& metrics) {
  if (!begun_) begin_after(0);
  for (const auto& sink : sinks_) sink->log(metrics);
}

void MetricsLogger::validated(const ValidationMetrics& metrics) {
  if (!begun_) begin_after(0);
  for (const auto& sink : sinks_) sink->log(metrics);
}

void MetricsLogger::flush() {
  for (const auto& sink : sinks_) sink->flush();
}

}  // namespace titan::train
