// Programs look at /dev/nvidia0 to learn whether there is a GPU. In a library of its own, because the functions here replace
// the C library's.

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

extern "C" int access(const char* path, int mode) {
  static const auto next = reinterpret_cast<int (*)(const char*, int)>(dlsym(RTLD_NEXT, "access"));
  if (path && strcmp(path, "/dev/nvidia0") == 0) return 0;
  return next(path, mode);
}
