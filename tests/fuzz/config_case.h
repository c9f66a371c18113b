#pragma once

// The common part of the TOML and JSON config fuzzers, beyond reading the file.

#include <algorithm>

#include "config/document.h"
#include "fuzz.h"
#include "scratch_folder.h"
#include "titan/config/load.h"
#include "unit/config/sample_job.h"

namespace titan::fuzz {

inline void require_places(const config::Place& place, std::string_view text, const char* file) {
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  require(place.file == file, "a place names the file");
  require(place.line >= 1 && place.line <= lines && place.column >= 1, "a place lies in the file");
}

inline void require_sound(const config::Document& document, std::string_view text, const char* file) {
  for (const config::Leaf& leaf : document.leaves) {
    require_places(leaf.place, text, file);
    require(!leaf.name.empty(), "a value has a name");
    to_text(leaf.value);
    type_of(leaf.value);
  }
  for (const config::Heading& heading : document.headings) require_places(heading.place, text, file);
}

/// Fills settings of every kind from the file. The result can be printed, and is the same when it is read
/// back.
inline void load_as_job(const std::string& name, std::string_view text) {
  using namespace config::sample;
  static const ScratchFolder folder;
  static const config::Schema job_schema = schema();
  const auto load_file = [&](std::string_view contents, Job& job) {
    load(job_schema, {.file = folder.write(name, contents), .overrides = {}}, job);
  };
  Job job, again;
  if (!accepted(name, [&] { load_file(text, job); })) return;
  const bool toml = name.ends_with(".toml");
  const std::string printed = toml ? print_toml(job_schema, job) : print_json(job_schema, job);
  load_file(printed, again);
  require(again.training == job.training && again.optimizer == job.optimizer &&
              again.validation == job.validation && again.float8 == job.float8 && again.model == job.model &&
              again.args().dim == job.args().dim && again.args().tie == job.args().tie,
          "a printed config reads back");
}

}  // namespace titan::fuzz
