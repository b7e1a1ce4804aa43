"""Extensions that a user of the library would write."""
