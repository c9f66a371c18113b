#include "job/flight_watch.h"

#include "dist/flight_record.h"
#include "job/job_config.h"

namespace titan::train {

std::shared_ptr<dist::Watchdog> make_watchdog(const JobConfig& config, const dist::World& world) {
  const CommSettings& comm = config.comm;
  dist::WatchdogOptions options;
  options.judges = false;
  options.folder = std::filesystem::path(config.job.dump_folder) / comm.save_traces_folder;
  if (comm.trace_buf_size > 0) options.record_prefix = comm.save_traces_file_prefix;
  options.computing_is_progress = world.device().is_cpu();
  return std::make_shared<dist::Watchdog>(world, std::move(options));
}

FlightPhases::FlightPhases(std::shared_ptr<dist::FlightRecorder> recorder) : recorder_(std::move(recorder)) {}

FlightPhases::~FlightPhases() { recorder_->set_activity("", 0); }

void FlightPhases::begin(Phase phase, int64_t step) {
  phases_.push_back(phase);
  recorder_->set_activity(name_of(phase), step);
}

// Back in the phase around it. One that fails stays: that is where the rank was.
void FlightPhases::end(Phase /*phase*/, int64_t step, bool failed) {
  phases_.pop_back();
  if (!failed) recorder_->set_activity(phases_.empty() ? "" : name_of(phases_.back()), step);
}

}  // namespace titan::train
