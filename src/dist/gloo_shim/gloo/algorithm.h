#pragma once

// See README.md: nothing of this header is used.
