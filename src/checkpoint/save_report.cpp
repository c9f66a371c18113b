#include "save_report.h"

#include "wire.h"

namespace titan::checkpoint::detail {

std::string to_bytes(const SaveReport& report) {
  WireWriter out;
  out.number(report.step);
  out.text(report.failure);
  out.number(report.file.num_bytes);
  out.text(report.file.header_digest);
  out.number(report.finite);
  out.number(report.num_threads);
  out.number(static_cast<int64_t>(report.texts.size()));
  for (const std::string& text : report.texts) out.text(text);
  return out.take();
}

SaveReport parse_report(const std::string& bytes) {
  WireReader in(bytes);
  SaveReport report;
  report.step = in.number();
  report.failure = in.text();
  report.file.num_bytes = in.number();
  report.file.header_digest = in.text();
  report.finite = in.number() != 0;
  report.num_threads = in.number();
  for (int64_t left = in.number(); left > 0; --left) report.texts.push_back(in.text());
  return report;
}

}  // namespace titan::checkpoint::detail
