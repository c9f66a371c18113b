// Carries the tests' precompiled headers. It is a program because its flags have to be those of the tests.
int main() { return 0; }
