def render(x, a, p):
    return "".join((chr(b) if 32 <= b < 127 else "~") + ("|" if e else "") for b, e in zip(x[1:160], a[1:160]))
