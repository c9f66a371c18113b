// The main function of the programs that link a single layer (TitanLayers.cmake).
int main() {}
