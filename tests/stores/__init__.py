"""Object stores of several vendors on loopback, and brim's jobs with each of them."""
