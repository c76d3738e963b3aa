"""The worker side: the engine model, a simulated SGLang worker, and the agent beside a real one."""
