"""`python -m tools.twins`: write the blocking client anew from the asynchronous one."""

from .generate import main

if __name__ == "__main__":
    main()
