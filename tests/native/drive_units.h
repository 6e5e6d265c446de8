// The driver of pools, beside that of arenas (drive.cpp).
#pragma once

// `arguments` are those behind the word `units`; returns an exit status.
int drive_units(char **arguments);
