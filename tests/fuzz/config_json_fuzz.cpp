// Parses a JSON config file as a document and as settings.

#include "config_case.h"

namespace titan::fuzz {

void fuzz_input(std::string_view text) {
  constexpr const char* kFile = "strange.json";
  config::Document document;
  if (!accepted(kFile, [&] { document = config::read_json(text, kFile); })) return;
  require_sound(document, text, kFile);
  load_as_job(kFile, text);
}

}  // namespace titan::fuzz
