// Parses a rank's flight record, ours or PyTorch's, and reports on it and a valid one of another rank.

#include "guard/flight_report.h"

#include "fuzz.h"

namespace titan::fuzz {
namespace {

constexpr const char* kFile = "strange_1.json";

const dist::FlightFile& sound_record() {
  static const dist::FlightFile file = dist::parse_flight_file(
      R"({"version": "2.10", "pg_config": {"0": {"desc": "dp", "ranks": "[0, 1]"}}, "entries": [{"record_id": 0,
          "process_group": ["0", "dp"], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
          "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "state": "started"}]})",
      "sound_0");
  return file;
}

}  // namespace

void fuzz_input(std::string_view input) {
  dist::FlightFile file;
  if (!accepted(kFile, [&] { file = dist::parse_flight_file(std::string(input), kFile); })) return;
  require(file.rank >= 0, "a record has a rank");
  for (const dist::FlightCall& call : file.calls)
    require(call.group < file.groups.size(), "a call has a group");
  const std::vector<dist::FlightFile> files = {sound_record(), std::move(file)};
  const dist::FlightReport report = dist::make_flight_report(files);
  require(!report.summary.empty(), "a report has a summary");
  require(report.lane >= report.lanes.size() || report.lanes[report.lane].calls.contains(report.sequence),
          "the call that a report is about is there");
}

}  // namespace titan::fuzz
