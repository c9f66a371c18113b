#include "train/run_mark.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>

#include "titan/checkpoint/manifest.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kRunMark = ".peer_run";

// Of what is in the file. Device numbers are left out: of one network file system they differ from host to
// host, and from boot to boot.
struct Marked {
  std::string run, inode, path;
};

std::string to_text(const Marked& marked) {
  return str(marked.run, "\n", marked.inode, "\n", marked.path, "\n");
}

// Nothing for what isn't such a file's.
std::optional<Marked> read_mark(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / kRunMark, ignored)) return std::nullopt;
  std::istringstream text(read_file(folder / kRunMark));
  Marked marked;
  const bool whole =
      std::getline(text, marked.run) && std::getline(text, marked.inode) && std::getline(text, marked.path);
  return whole && !marked.run.empty() ? std::optional(marked) : std::nullopt;
}

std::string random_run() {
  std::random_device source;
  return checkpoint::digest_of(str(source(), " ", source(), " ", source(), " ", source()));
}

// Where the run saves, its number being somebody else's yet.
Marked place_of(const fs::path& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0)
    throw Error(str("cannot look at ", folder.string(), ": ", std::strerror(errno)));
  return {.run = "", .inode = std::to_string(status.st_ino), .path = fs::canonical(folder).string()};
}

// With another path: renamed, or seen from another host. A copy has another inode; a snapshot of a file
// system hasn't, but what it was taken of is still there.
bool is_same_run(const Marked& saved, const Marked& now) {
  if (saved.path == now.path) return true;
  if (saved.inode != now.inode) return false;
  std::error_code ignored;
  return !fs::exists(saved.path, ignored) || fs::equivalent(saved.path, now.path, ignored);
}

}  // namespace

RunMark run_mark(const fs::path& folder) {
  Marked now = place_of(folder);
  const std::optional<Marked> saved = read_mark(folder);
  now.run = saved && is_same_run(*saved, now) ? saved->run : random_run();
  if (!saved || to_text(*saved) != to_text(now)) write_file_atomic(folder / kRunMark, to_text(now));
  return {.run = now.run, .folder = str(now.path, " (inode ", now.inode, ")")};
}

}  // namespace titan::train
