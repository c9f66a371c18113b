// What a layer links with (TitanLayers.cmake).
int main() {}
