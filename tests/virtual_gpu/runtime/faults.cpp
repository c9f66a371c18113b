#include "runtime/faults.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace virtual_gpu {
namespace {

// The script names the file, after its own process, which becomes the program. Null without VIRTUAL_GPU_RACES=fatal.
const char* notes() {
  const char* path = std::getenv("VIRTUAL_GPU_FAULTS");
  return path && *path ? path : nullptr;
}
bool is_of_this_process(const char* path) {
  const char* dot = std::strrchr(path, '.');
  return dot && std::atoi(dot + 1) == getpid();
}

void report(const char* format, std::va_list arguments) {
  char* text = nullptr;
  const int size = vasprintf(&text, format, arguments);
  if (size < 0) return;
  std::fputs(text, stderr);
  // The end of the program itself can't be missed.
  if (const char* path = notes(); path && !is_of_this_process(path)) {
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || write(file, text, static_cast<size_t>(size)) != size)
      std::fprintf(stderr, "virtual GPU: can't write to %s\n", path);
    if (file >= 0) close(file);
  }
  std::free(text);
}

}  // namespace

void report_fault(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  report(format, arguments);
  va_end(arguments);
}

void end_program(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  report(format, arguments);
  va_end(arguments);
  std::abort();
}

// Without allocations, because handlers of signals end processes, too.
int status_with_faults(int status) {
  const char* path = notes();
  const int file = path && is_of_this_process(path) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return status;
  unlink(path);
  dprintf(STDERR_FILENO, "virtual GPU: processes of this program had faults:\n");
  char text[4096];
  for (ssize_t size = 0; (size = read(file, text, sizeof text)) > 0;)
    dprintf(STDERR_FILENO, "%.*s", static_cast<int>(size), text);
  close(file);
  return status == 0 ? 1 : status;
}

}  // namespace virtual_gpu
