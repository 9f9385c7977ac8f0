# The server of a team: docs/containers.md. It needs no torch, so the image has none.
ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /src
COPY pyproject.toml README.md ./
COPY advisor advisor
COPY tuners tuners
COPY cache cache
# Every requirement of `advisor serve`, as pyproject.toml lists them, but torch and torchvision.
RUN python -c "import tomllib; own = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*(one for one in [*own['dependencies'], *own['optional-dependencies']['serve']] \
if not one.startswith('torch')), sep='\n')" > requirements.txt \
    && pip install --no-cache-dir -r requirements.txt \
    && pip install --no-cache-dir --no-deps . \
    && useradd --uid 10001 --create-home advisor \
    && install -d -o advisor -g advisor /data

# A number: Kubernetes' runAsNonRoot does not look up names.
USER 10001
WORKDIR /data
ENV XDG_DATA_HOME=/data XDG_CACHE_HOME=/data/cache PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 8765
HEALTHCHECK --start-period=30s --timeout=5s CMD ["python", "-c", \
    "import urllib.request as u; u.urlopen('http://127.0.0.1:8765/readyz', timeout=4)"]
# Without a shell: the server is process 1 and gets SIGTERM.
ENTRYPOINT ["advisor"]
CMD ["serve", "--host", "0.0.0.0", "--behind-proxy"]
