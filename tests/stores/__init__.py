"""Object stores of several makers, on loopback, and brim's jobs at each of them."""
