#include "titan/cli/main.h"

int main(int argc, char** argv) { return titan::cli::main(argc, argv); }
