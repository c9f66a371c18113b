// The program `titan` with your own model linked in.
#include "titan/cli/main.h"
#include "ngram.h"

int main(int argc, char** argv) {
  register_ngram();
  return titan::cli::main(argc, argv);
}
