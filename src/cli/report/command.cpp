// titan report: a run as one HTML page.

#include <cstdint>
#include <cstdio>

#include "cli/commands.h"
#include "cli/parser.h"
#include "cli/report/page.h"
#include "cli/text.h"
#include "titan/core/file.h"

namespace titan::cli {

namespace {

constexpr const char* kReportNotes =
    "RUN is a run's job.dump_folder. Writes one HTML file that needs no network and no other file: loss, "
    "gradient\n"
    "norm, throughput, memory, where the time went, ranks, validation, checkpoints, starts, configuration "
    "and\n"
    "environment. Works while the run is running; call it again for a new page.\n";

struct ReportArguments {
  std::string help;
  std::filesystem::path run;
  std::filesystem::path output;
};

ReportArguments parse_report_arguments(const Arguments& words) {
  ReportArguments arguments;
  Parser parser("titan report", "titan report RUN [-o FILE]", kReportNotes);
  parser.app.add_option("RUN", arguments.run, "a run's folder")->required()->type_name("FOLDER");
  parser.app.add_option("-o,--output", arguments.output, "the file to write (default: RUN/report.html)")
      ->type_name("FILE");
  arguments.help = parser.parse(words);
  if (arguments.output.empty()) arguments.output = arguments.run / "report.html";
  return arguments;
}

}  // namespace

int report_command(const Arguments& words) {
  const ReportArguments arguments = parse_report_arguments(words);
  if (!arguments.help.empty()) return print(arguments.help);
  report::PageInput input;
  input.run = read_history(arguments.run);
  input.ranks = newest_of_ranks(arguments.run, report::kMostRanks, {.spans = false});
  input.num_ranks = static_cast<int>(newest_files(arguments.run, SIZE_MAX / 2).size());
  input.now_us = now_us();
  write_file_atomic(arguments.output, report::page(input));
  std::printf("%s\n", arguments.output.c_str());
  return 0;
}

}  // namespace titan::cli
