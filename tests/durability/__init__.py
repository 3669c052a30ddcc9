"""When steps become durable, and what that costs."""
