#include "titan/train/metrics.h"

#include <chrono>
#include <ctime>

#include "core/durable.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/event_file.h"

namespace titan::train {

namespace {

double steady_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string minute_now() {
  std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char name[32];
  std::strftime(name, sizeof name, "%Y%m%d-%H%M", &local);
  return name;
}

// One folder per start, so that TensorBoard shows a restarted run beside the first; and one for the steps
// behind a rewind, which are taken again.
std::filesystem::path fresh_folder(const std::filesystem::path& parent) {
  const std::string name = minute_now();
  std::filesystem::path folder = parent / name;
  for (int number = 2; std::filesystem::exists(folder); ++number) folder = parent / str(name, "-", number);
  return folder;
}

// What only some devices have: no tag in place of a zero that isn't one.
void write_known(EventFileWriter& events, const StepMetrics& m) {
  if (m.mfu) events.write(m.step, {{"mfu(%)", *m.mfu}});
  if (m.active_gib)
    events.write(m.step, {{"memory/max_active(GiB)", *m.active_gib},
                          {"memory/max_active(%)", m.active_percent.value_or(0)}});
  if (m.alloc_retries)
    events.write(m.step, {{"memory/num_alloc_retries", static_cast<double>(*m.alloc_retries)},
                          {"memory/num_ooms", static_cast<double>(m.num_ooms.value_or(0))}});
}

}  // namespace

void describe(config::Table<MetricsSettings>& table) {
  table.field("log_freq", &MetricsSettings::log_freq,
              "steps from one logged step to the next; step 1 is always logged", config::at_least(1));
  table.field("enable_tensorboard", &MetricsSettings::enable_tensorboard, "write TensorBoard event files");
  table.refused("enable_wandb", false,
                "Weights & Biases needs its Python package: scripts/wandb_offline.py makes an offline run of "
                "metrics.jsonl");
  table.field("disable_color_printing", &MetricsSettings::disable_color_printing,
              "no colours on the terminal");
  table.field("save_tb_folder", &MetricsSettings::save_tb_folder,
              "of the event files, under job.dump_folder");
  table.field("save_for_all_ranks", &MetricsSettings::save_for_all_ranks,
              "ranks other than 0 write metrics too, each in a folder rank_<r> of job.dump_folder");
  table.field("peak_flops", &MetricsSettings::peak_flops,
              "FLOP/s of one device, for mfu; unset: by the GPU's name, unknown for CPUs",
              config::at_least(1));
}

MetricsLogger::MetricsLogger(Options options)
    : options_(std::move(options)), remaining_(options_.total_steps) {
  color_ = options_.on_terminal && !options_.settings.disable_color_printing;
}

void MetricsLogger::begin_after(int64_t step) {
  begun_ = true;
  if (!options_.writes) return;
  const auto metrics = options_.folder / "metrics.jsonl", validation = options_.folder / "validation.jsonl";
  if (step > 0) {
    keep_rows_up_to(step, metrics);
    keep_rows_up_to(step, validation);
  }
  step_lines_ = std::make_unique<AppendFile>(metrics, /*truncate=*/step == 0);
  if (step > 0 && std::filesystem::exists(validation))
    validation_lines_ = std::make_unique<AppendFile>(validation, /*truncate=*/false);
  if (options_.settings.enable_tensorboard)
    events_ =
        std::make_unique<EventFileWriter>(fresh_folder(options_.folder / options_.settings.save_tb_folder));
}

MetricsLogger::~MetricsLogger() = default;

void MetricsLogger::logged(const StepMetrics& m) {
  if (!options_.writes) return;
  if (!begun_) begin_after(0);
  step_lines_->append(json_line(m) + "\n");
  if (events_)
    events_->write(m.step,
                   {{"loss_metrics/global_avg_loss", m.loss},
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
                    {"lr", m.lr}});
  if (events_) write_known(*events_, m);
  if (events_ && m.skipped_steps)
    events_->write(m.step, {{"skipped_steps", static_cast<double>(*m.skipped_steps)}});
  if (events_ && m.checkpoint_s) events_->write(m.step, {{"time_metrics/checkpoint(s)", *m.checkpoint_s}});
  log::info_rank0(console_line(m, color_) + remaining(m.step));
}

void MetricsLogger::validated(const ValidationMetrics& m) {
  if (!options_.writes) return;
  if (!begun_) begin_after(0);
  if (!validation_lines_)
    validation_lines_ = std::make_unique<AppendFile>(options_.folder / "validation.jsonl", /*truncate=*/true);
  validation_lines_->append(json_line(m) + "\n");
  if (events_)
    events_->write(m.step, {{"validation_metrics/loss", m.loss},
                            {"validation_metrics/throughput(tps)", m.tps},
                            {"validation_metrics/memory/max_reserved(GiB)", m.memory_gib},
                            {"validation_metrics/memory/max_reserved(%)", m.memory_percent}});
  log::info_rank0(console_line(m, color_));
}

void MetricsLogger::flush() {
  if (step_lines_) step_lines_->sync();
  if (validation_lines_) validation_lines_->sync();
  if (events_) events_->sync();
}

std::string MetricsLogger::remaining(int64_t step) {
  if (!options_.on_terminal || options_.total_steps <= 0) return "";
  auto left = remaining_.seconds_left(step, steady_s());
  return left ? progress(step, options_.total_steps, *left) : "";
}

}  // namespace titan::train
