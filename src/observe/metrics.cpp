#include "titan/observe/metrics.h"

#include <algorithm>
#include <ctime>

#include "observe/metrics_format.h"
#include "observe/structured_log.h"
#include "titan/core/log.h"

namespace titan::train {

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
    for (const auto& path : {steps_path_, validations_path_})
      if (step > 0) keep_rows_up_to(step, path);
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

  // Named by the minute. Every start and every rewind has a folder of its own, so that TensorBoard shows
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
