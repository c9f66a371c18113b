#include "guard/hang_report.h"

#include <signal.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <ctime>

#include "core/thread_stacks.h"
#include "dist/flight_record.h"
#include "dist/side_thread.h"
#include "guard/flight_dump.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::dist {

namespace {

constexpr size_t kShownCalls = 8;

double seconds_since(int64_t start_ns) {
  using namespace std::chrono;
  const auto now = duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
  return std::round(static_cast<double>(now - start_ns) / 1e7) / 100;
}

std::string last_calls(const FlightRecorder& recorder) {
  const auto calls = recorder.snapshot();
  if (calls.empty()) return "no collective was called\n";
  std::string text = "its last calls:\n";
  for (size_t i = calls.size() - std::min(calls.size(), kShownCalls); i < calls.size(); ++i)
    text += str("  ", calls[i].number, " ", calls[i].describe(), ", ", calls[i].bytes, " bytes, ",
                name_of(calls[i].state), ", ", seconds_since(calls[i].start_ns), " s ago\n");
  return text;
}

std::string place_of(const Beat& beat) {
  return str(name_of(beat.kind), ", ", beat.what, beat.step < 0 ? "" : str(" of step ", beat.step),
             ", without progress for ", static_cast<double>(beat.stalled_ms) / 1000, " s of ",
             static_cast<double>(beat.limit_ms) / 1000);
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[40];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

void write_report(const std::filesystem::path& path, const std::string& text) {
  try {
    make_folder(path.parent_path());
    write_file_atomic(path, text);
  } catch (const std::exception& error) {
    log::error(str("the stacks can't be written: ", error.what()));
  }
}

extern "C" void end_hung_process(int /*signal*/) { _exit(kHungExitCode); }

}  // namespace

std::string open_call(const FlightRecorder& recorder, ProgressKind kind) {
  const auto call = recorder.open_call(/*with_background=*/kind == ProgressKind::Checkpoint);
  return call ? call->describe() : "";
}

std::string hang_report(int rank, const Beat& beat, const FlightRecorder& recorder) {
  return str("rank ", rank, " (", beat.host, ", pid ", beat.pid, ") is at ", place_of(beat), "\n",
             last_calls(recorder), "its threads:\n", to_text(thread_stacks()));
}

std::filesystem::path stacks_path(const std::filesystem::path& folder, int rank) {
  return folder / str("stacks_", rank, ".txt");
}

// What hung the job may be the same file system.
void leave_files(const HangFiles& files, SideThread& thread, std::chrono::milliseconds limit) {
  thread.post([files] {
    if (!files.folder.empty())
      write_report(stacks_path(files.folder, files.rank), time_now() + "\n" + files.report);
    if (files.records) files.records->write(files.reason.c_str(), FlightExtent::Last);
  });
  if (!thread.wait(limit))
    log::error(str("the files of this hang can't be written: ", files.folder.string(), " doesn't answer"));
}

void end_process_after(std::chrono::seconds limit) {
  signal(SIGALRM, end_hung_process);
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
  alarm(static_cast<unsigned>(limit.count()));
}

}  // namespace titan::dist
