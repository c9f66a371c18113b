// Carries the tests' precompiled header (pch_test.h): a program, as the tests are: flags have to agree.
int main() { return 0; }
