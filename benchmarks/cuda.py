"""The script of gpu.py. It does nothing if imported: torch looks for a package of this name, and finds this file."""

if __name__ == "__main__":
    from gpu import main

    main()
