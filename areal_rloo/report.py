def write_report(folder):
    return folder
