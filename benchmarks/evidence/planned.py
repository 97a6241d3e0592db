def planned(config, processes, device_name):
    return {"planned_gb": None, "planned_s": None}
